"""`retain doctor --engines`: handshakes of every two engines, shown and put on record."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Column, Table

from retain.cli.terminal import BAD, stdout
from retain.errors import ConfigError

if TYPE_CHECKING:
    from retain.handshake import Verdict

MODULES = MappingProxyType({"transformers": "transformers", "llamacpp": "llama_cpp", "vllm": "vllm"})
"""The engines, and the module by which one is known to be installed."""


def handshakes(model: str, pythons: Sequence[str], as_json: bool) -> None:
    """Make the handshakes of a model, print them; exit 1 where one did not pass."""
    from retain.bench.handshake import Side, shake
    from retain.bench.probe import probe_tokens
    from retain.handshake import record_path
    from retain.models import find

    found = find(model)
    places = chosen(pythons)
    if found.kind != "gguf":
        places.pop("llamacpp", None)  # it reads nothing else
    if len(places) < 2:
        raise ConfigError(
            f"a handshake takes two engines, and {', '.join(places) or 'none'} can run {model} here; name "
            "the Python of another environment: --python vllm=/path/to/python"
        )
    sides = [Side(engine, model, python) for engine, python in places.items()]
    verdicts = shake(sides, probe_tokens(found))
    if as_json:
        print(json.dumps([told(each) for each in verdicts]))
    else:
        stdout.print(table(verdicts))
        stdout.print(f"On record in {escape(str(record_path()))}; engines that are started now go by it.")
    if not all(each.passed for each in verdicts):
        raise typer.Exit(BAD)


def chosen(pythons: Sequence[str]) -> dict[str, str]:
    """The engines at hand, each with the Python that has it. Raises ConfigError."""
    places = {
        engine: sys.executable for engine, module in MODULES.items() if importlib.util.find_spec(module)
    }
    for each in pythons:
        engine, _, path = each.partition("=")
        if engine not in MODULES or not path:
            raise ConfigError(f"--python takes ENGINE=PATH, ENGINE one of {', '.join(MODULES)}; got {each!r}")
        places[engine] = path
    return {engine: places[engine] for engine in MODULES if engine in places}


def table(verdicts: Sequence[Verdict]) -> Table:
    """A row for each direction."""
    shown = Table(
        "KV of", "read by", "class", "passed", "KL", "noise", "top-1", "K apart, by layer",
        "V apart, by layer", Column("why not", overflow="fold"),
    )  # fmt: skip
    for each in verdicts:
        shown.add_row(
            each.writer.engine,
            each.reader.engine,
            each.kinship,
            "[green]yes[/]" if each.passed else "[red]no[/]",
            f"{each.kl:.1e}",
            f"{each.noise:.1e}",
            f"{100 * each.top1:.0f} %",
            spread(each.k),
            spread(each.v),
            escape(each.reason if not each.passed else ""),
        )
    return shown


def spread(layers: Sequence[float]) -> str:
    """The first layer, the last, and the one furthest apart."""
    if not layers:
        return ""
    worst = max(range(len(layers)), key=layers.__getitem__)
    return f"{layers[0]:.1e} ... {layers[-1]:.1e}, most {layers[worst]:.1e} ({worst})"


def told(verdict: Verdict) -> Mapping[str, object]:
    """A verdict as JSON has it, with every layer's distances."""
    return {
        "from": verdict.writer.engine,
        "to": verdict.reader.engine,
        "class": verdict.kinship,
        "passed": verdict.passed,
        "kl": verdict.kl,
        "noise": verdict.noise,
        "top1": verdict.top1,
        "k": verdict.k,
        "v": verdict.v,
        "reason": verdict.reason if not verdict.passed else "",
    }
