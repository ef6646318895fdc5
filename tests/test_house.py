"""The house rules: who may call whom, who may import an engine, what runs without one, how files begin."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "retain"
MODULES = sorted(SOURCE.rglob("*.py"))

LEVELS = (
    ("errors",),
    (
        "_native",
        "identity",
        "fidelity",
        "model",
        "geometry",
        "weights",
        "gguf",
        "gguf_header",
        "digests",
        "fingerprint",
        "models",
    ),
    # A block calls codecs, which know nothing of blocks; both name the buffers that stores take.
    ("header", "codecs", "stores.base", "block", "lower", "dtypes"),
    ("stores", "address", "config", "handshake"),
    ("cache",),
    ("daemon", ""),
    ("testing", "engines", "reuse", "insight", "edit", "profile"),
    ("bench", "gateway", "relay"),
    ("cli",),
)
"""The house from the ground up: a module calls its own level and those below. `""` is `retain` itself."""

ENGINES = {
    "torch": "engines",  # several engines are made of it
    "transformers": "engines.transformers",
    "tokenizers": "engines.transformers",
    "vllm": "engines.vllm",
    "llama_cpp": "engines.llamacpp",
    "xllamacpp": "engines.llamacpp",
    "sglang": "engines.sglang",
}
"""Packages of engines, and the part of the house that alone may import each."""

MOST_LINES = 450


def name_of(path: Path) -> str:
    """A module's dotted name below `retain`, empty for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in a file, in functions too: its line and the module's full dotted name."""
    package = ("retain." + name_of(path)).rstrip(".").split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from retain.bench import store` names a module, `from retain.cache import Cache` an object.
                inner = SOURCE.joinpath(*module.split(".")[1:], alias.name)
                files = (inner, inner.with_suffix(".py"), inner.with_suffix(".pyi"))
                found = module.startswith("retain") and any(map(Path.exists, files))
                yield node.lineno, f"{module}.{alias.name}" if found else module


def level_of(module: str) -> int:
    """The level of a module below `retain`: that of its longest listed prefix."""
    best = max(
        (
            (len(part), number)
            for number, parts in enumerate(LEVELS)
            for part in parts
            if module == part or (part and module.startswith(f"{part}."))
        ),
        default=None,
    )
    assert best is not None, f"retain.{module} has no place in the house: give it a level in this test"
    return best[1]


def broken(path: Path) -> list[str]:
    """The imports of a file that go up the house, or into an engine that is not its own."""
    own = name_of(path)
    found = []
    for line, target in imports(path):
        root, _, inner = target.partition(".")
        if root == "retain" and level_of(inner) > level_of(own):
            found.append(f"{path.name}:{line}: retain.{own} imports {target}, which lies above it")
        home = ENGINES.get(root)
        if home is not None and own != home and not own.startswith(f"{home}."):
            found.append(f"{path.name}:{line}: retain.{own} imports {target}; only retain.{home} may")
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_calls_go_down_the_house_and_engines_stay_with_their_adapters(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("identity.py", "from retain.cache import Cache"),
        ("stores/disk.py", "from retain.engines.transformers import attach"),
        ("cache/cache.py", "from ..gateway import run_server"),
        ("engines/transformers/adapter.py", "from retain import bench"),
        ("block.py", "import torch"),
        ("engines/vllm/connector.py", "import transformers.models"),
        ("gateway/app.py", "def late():\n    from torch import nn"),
    ],
)
def test_the_rule_finds_what_breaks_it(
    place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    for package in ("bench", "cache", "gateway"):
        (tmp_path / package).mkdir(exist_ok=True)
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    assert len(broken(path)) == 1


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_first_what_it_is_for(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert said, f"{path} has no docstring"
    assert path.read_text("utf-8").startswith('"""'), f"the docstring of {path} is not its first line"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_holds_one_idea(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    if name_of(path).startswith("testing."):
        lines -= 100  # a conformance suite is a list of cases, which is longer than an idea
    assert lines <= MOST_LINES, f"{path} has {lines} lines; it probably holds two ideas"


BARE = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])

sys.meta_path.insert(0, Blocked())
from retain.errors import MissingDependency

for name in {modules!r}:
    try:
        importlib.import_module(name)
    except MissingDependency as error:
        print("needs", name, error)
    except BaseException as error:
        print("fails", name, type(error).__name__, error)
"""

ENGINE_PACKAGES = [*ENGINES, "safetensors", "gguf", "accelerate"]


def without(blocked: list[str], modules: list[str]) -> dict[str, str]:
    """Import modules in a fresh interpreter that lacks some packages: what went wrong, by module."""
    script = BARE.format(blocked=set(blocked), modules=modules)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {line.split()[1]: line for line in ran.stdout.splitlines()}


def test_a16_every_module_imports_without_any_engine() -> None:
    names = [f"retain.{name_of(path)}".rstrip(".") for path in MODULES if path.name != "__main__.py"]
    troubles = without(ENGINE_PACKAGES, names)
    for name, line in troubles.items():
        assert name.startswith(
            (
                "retain.engines.",
                "retain.gateway.local",
                "retain.bench.ttft",
                "retain.bench.llamacpp_ttft",
                "retain.bench.planner",
            )
        ), line
        # The front door says what to install. vLLM itself imports the rooms behind its own, so it is there.
        if name.startswith("retain.engines.vllm."):
            assert "ModuleNotFoundError No module named" in line or "pip install 'retain[" in line, line
        else:
            assert line.startswith("needs"), line
            assert "pip install 'retain[" in line, line


def test_a16_the_command_line_and_the_cache_need_none_of_the_optional_packages() -> None:
    optional = [
        *ENGINE_PACKAGES,
        "starlette",
        "uvicorn",
        "prometheus_client",
        "matplotlib",
        "openai",
        "jinja2",
        "redis",
    ]
    assert (
        without(optional, ["retain", "retain.cli", "retain.cache", "retain.stores", "retain.testing"]) == {}
    )


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "matplotlib", "starlette", "numpy")
    script = f"import sys, retain.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
