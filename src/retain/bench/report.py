"""Report: what a bench found, as one JSON object, a table or a chart, and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from retain.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

Value = float | int | str | bool | None


@dataclass(frozen=True)
class Machine:
    """What a figure depends on: the processor, its cores for this process, memory, system and Python."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str


def this_machine() -> Machine:
    """The machine this process runs on."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Report:
    """A bench's result. `ratios` have stable dotted names; a False in `checks` fails the bench.

    Units are the last word of a row's key: `_seconds`, `_bytes`, `_tokens`; rows may have different keys.
    """

    name: str
    rows: Sequence[Mapping[str, Value]]
    ratios: Mapping[str, float] = field(default_factory=dict)
    checks: Mapping[str, bool] = field(default_factory=dict)
    machine: Machine = field(default_factory=this_machine)

    @property
    def passed(self) -> bool:
        return all(self.checks.values())

    def json(self) -> str:
        """The one object that `--json` prints."""
        return json.dumps(
            {
                "name": self.name,
                "machine": asdict(self.machine),
                "rows": [dict(row) for row in self.rows],
                "ratios": dict(self.ratios),
                "checks": dict(self.checks),
            }
        )


def spread(seconds: Sequence[float]) -> dict[str, Value]:
    """The part of a row that tells of repeated times to the first token: how many, median, least, most."""
    return {
        "runs": len(seconds),
        "ttft_seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
    }


def tables(report: Report) -> list[Table]:
    """The report as rich tables: rows, then ratios and checks."""
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in report.rows for key in row))
    machine = report.machine
    rows = Table(
        title=f"{report.name} ({machine.cpu}, {machine.cores} cores, {_bytes(machine.memory_bytes)})",
        title_justify="left",
    )
    for column in columns:
        text = any(isinstance(row.get(column), str) for row in report.rows)
        rows.add_column(column.replace("_", " "), justify="left" if text else "right")
    for row in report.rows:
        rows.add_row(*(cell(column, row.get(column)) for column in columns))
    found = [rows]
    if report.ratios or report.checks:
        summary = Table(show_header=False)
        for name, ratio in report.ratios.items():
            summary.add_row(name, f"{ratio:.4g}" if abs(ratio) < 1e5 else f"{ratio:,.0f}")
        for name, passed in report.checks.items():
            summary.add_row(name, "[green]yes[/]" if passed else "[bold red]NO[/]")
        found.append(summary)
    return found


def cell(key: str, value: Value) -> str:
    """A value as a person reads it, by the unit in its key's last word."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    unit = key.rpartition("_")[2]
    if unit == "seconds":
        return _seconds(value)
    if unit == "bytes":
        return _bytes(value)
    if unit == "rate":
        return f"{value:.4f}"
    if unit == "second":  # bytes_per_cpu_second and the like
        return f"{_bytes(value)}/s" if key.startswith("bytes") else f"{value:,.0f}/s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.2f} µs"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def new_figure(width: float = 8.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """A matplotlib figure with the look that all of Retain's charts share. Raises MissingDependency."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("charts need matplotlib: pip install 'retain[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure; the kind of file follows the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
