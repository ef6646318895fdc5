"""Long texts that every machine has: programs of Python's standard library."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retain.errors import ConfigError

MODULES = (
    "textwrap", "heapq", "shlex", "bisect", "fnmatch", "sched", "getopt", "string", "netrc", "queue", "copy",
    "reprlib", "glob", "cmd", "csv", "pprint", "configparser", "calendar", "difflib", "argparse",
)  # fmt: skip
"""Plain modules that have been in every Python for decades, roughly by how well they read."""


@dataclass(frozen=True)
class Program:
    """A module's name, its source, and how many tokens that is."""

    name: str
    source: str
    tokens: int


def program(count: Callable[[str], int], low: int, high: int) -> Program:
    """The first module of `low` to `high` tokens, as `count` counts them. Raises ConfigError."""
    seen = []
    for name in MODULES:
        source = source_of(name)
        tokens = count(source) if source else 0
        if low <= tokens <= high:
            return Program(name, source, tokens)
        seen.append(f"{name} {tokens}")
    raise ConfigError(f"no program has {low} to {high} tokens; looked at {', '.join(seen)}")


def long_prompt(encode: Callable[[str], Sequence[int]], tokens: int) -> list[int]:
    """The first `tokens` token ids of as many programs as it takes. Raises ConfigError."""
    ids: list[int] = []
    for name in MODULES:
        ids.extend(encode(source_of(name)))
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ConfigError(f"the programs at hand have {len(ids)} tokens in all, too few for {tokens}")


def source_of(module: str) -> str:
    """The source of a module of the standard library, empty where this Python comes without it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text("utf-8")
