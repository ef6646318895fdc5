"""Profiles of tiny models, learned once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from retain.codecs.ladder import shelf  # noqa: E402
from retain.codecs.ladder.profile import Profile  # noqa: E402
from retain.engines.transformers.identity import spec_of  # noqa: E402
from retain.engines.transformers.loading import Loaded  # noqa: E402
from retain.engines.transformers.study import Study  # noqa: E402
from retain.profile.make import make  # noqa: E402
from tests.engines.transformers.conftest import _one_thread, opened  # noqa: E402, F401
from tests.engines.transformers.tiny import MODELS, VOCABULARY  # noqa: E402

WIDTH = 256


def text(seed: int, count: int = 704) -> np.ndarray:
    """Tokens with some that come again and again, as in a language."""
    rng = np.random.default_rng(seed)
    return (2 + np.minimum(rng.geometric(0.05, count), VOCABULARY - 3)).astype(np.uint32)


@lru_cache(maxsize=4)
def tiny(name: str) -> tuple[Any, Study]:
    model = MODELS[name]()
    return model, Study(Loaded(model, None, spec_of(model)))


@lru_cache(maxsize=8)
def learned(name: str, noise: bool = False) -> Profile:
    return make(tiny(name)[1], [text(seed) for seed in range(10)], WIDTH, noise=noise)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, so that profiles of other tests are not found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def profiled(cache_folder: Path) -> Callable[[str], Any]:
    """Gives a tiny model whose profile is on the shelf."""

    def profiled_one(name: str) -> Any:
        shelf.keep(learned(name))
        return tiny(name)[0]

    return profiled_one
