"""Bench `trace` with codecs: the hit rate that the same bytes buy when a tier's blocks are coded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retain.bench.progress import Steps
from retain.bench.replay import replay_policy
from retain.bench.report import Report, Value, new_figure
from retain.bench.trace import CAPACITIES, DEFAULT, OTHER_CAPACITIES
from retain.bench.traces import read_trace
from retain.codecs.ladder.shelf import profile_for
from retain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW_BITS = 16
"""Bits a value of raw KV, in the dtypes that engines keep it in."""


def run(name: str, data: Path | None, kin: bytes, codecs: Sequence[str], capacities: Sequence[int]) -> Report:
    """Replay trace `name` with the default policy, at the bytes of `capacities` raw blocks of 16-bit KV, for
    a tier that keeps blocks raw and for each of `codecs`.

    How many bits a value a level takes is what the profile of this kin declares. Raises ConfigError.
    """
    sizes = {"raw": float(RAW_BITS), **bits_of(kin, codecs)}
    chosen = sorted(dict.fromkeys(capacities or CAPACITIES.get(name, OTHER_CAPACITIES)))
    rows: list[dict[str, Value]] = []
    ratios: dict[str, float] = {}
    with Steps(f"trace {name}", len(chosen) * len(sizes)) as steps:
        steps.step("reading", 0)
        trace = read_trace(name, data)
        for capacity in chosen:
            for codec, bits in sizes.items():
                blocks = int(capacity * RAW_BITS / bits)
                steps.step(f"{codec}, {blocks:,} blocks", 0)
                found = replay_policy(trace, blocks, DEFAULT)
                steps.step(f"{codec}, {blocks:,} blocks")
                rows.append(
                    {
                        "trace": trace.name, "codec": codec, "bits_per_value": bits, "capacity_raw": capacity,
                        "capacity": blocks, "hit_rate": found.hit_rate, "evictions": found.evictions,
                    }
                )  # fmt: skip
                ratios[f"trace.{codec}.{capacity}.hit_rate"] = found.hit_rate
    return Report("trace", rows, ratios)


def bits_of(kin: bytes, codecs: Sequence[str]) -> dict[str, float]:
    """Bits a value of each level, as the newest profile of a kin declares. Raises ConfigError."""
    profile = profile_for(kin)
    if profile is None:
        raise ConfigError(
            "no profile of the model is here to tell how small its blocks become: `retain profile MODEL`"
        )
    unknown = [codec for codec in codecs if codec not in profile.declared]
    if unknown:
        raise ConfigError(f"the profile knows no {unknown[0]!r}; it knows {', '.join(profile.declared)}")
    return {codec: profile.declared[codec][1] for codec in codecs}


def plot(report: Report) -> Figure:
    """Hit rate over bytes, one line a codec."""
    figure, axes = new_figure()
    for codec in dict.fromkeys(str(row["codec"]) for row in report.rows):
        points = [(row["capacity_raw"], row["hit_rate"]) for row in report.rows if row["codec"] == codec]
        axes.plot(
            [float(x or 0) for x, _ in points], [100 * float(y or 0) for _, y in points], "o-", label=codec
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity in bytes, as how many raw 16-bit blocks it would hold")
    axes.set_ylabel("tokens found, % of all input tokens")
    axes.set_title(f"The hit rate that the same bytes buy on {report.rows[0]['trace']}", loc="left")
    axes.legend(frameon=False)
    return figure
