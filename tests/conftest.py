"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of traces and texts; tests that need it are skipped where there is none."""
    given = os.environ.get("RETAIN_DATA")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the folder of traces {folder} is not here; set RETAIN_DATA to run this test")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The packaged SmolLM2 in float32, loaded once for all tests: a Loaded, to be left as it is."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from retain.engines.transformers.loading import load
    from retain.errors import MissingDependency

    try:
        return load("smollm2")
    except MissingDependency as error:
        pytest.skip(str(error))
