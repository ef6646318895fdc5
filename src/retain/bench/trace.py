"""Bench `trace`: hit rates of the eviction policies on traces of real requests, below Belady's optimum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retain.bench.progress import Steps
from retain.bench.replay import Replay, replay_belady, replay_policy, replay_rival
from retain.bench.report import Report, Value, new_figure
from retain.bench.rivals import RIVALS
from retain.bench.traces import Trace, read_trace
from retain.config import POLICIES as PRODUCT
from retain.config import Settings
from retain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = Settings().policy
POLICIES = (*PRODUCT, *RIVALS, "belady", "belady-leaf")
CAPACITIES = {
    "mooncake-conversation": (10_000, 1_000, 2_000, 5_000, 20_000, 50_000),
    "mooncake-synthetic": (5_000, 500, 1_000, 2_000, 10_000, 20_000),
    "weka": (100_000, 20_000, 50_000, 200_000, 500_000, 1_000_000),
    "weka-eighth": (20_000, 5_000, 10_000, 50_000, 100_000, 200_000),
}
"""Replayed unless others are asked for; the first is the one that ratios without a capacity are of."""
OTHER_CAPACITIES = (10_000, 1_000, 2_000, 5_000, 20_000, 50_000)

REFERENCE = {
    ("mooncake-conversation", "lru", 1_000): 0.0457,
    ("mooncake-conversation", "lru", 5_000): 0.1196,
    ("mooncake-conversation", "lru", 10_000): 0.2192,
    ("mooncake-conversation", "lru", 20_000): 0.2993,
    ("mooncake-conversation", "lru", 50_000): 0.3628,
    ("mooncake-conversation", "belady", 1_000): 0.1825,
    ("mooncake-conversation", "belady", 5_000): 0.3457,
    ("mooncake-conversation", "belady", 10_000): 0.3734,
}
"""Hit rates of an independent simulator on the published trace, to four digits."""

_STEPS_PER_REPLAY = 100


def run(name: str, data: Path | None, capacities: Sequence[int] = (), policies: Sequence[str] = ()) -> Report:
    """Replay trace `name` for every capacity (in blocks) and policy.

    The ratios without a capacity in their name are those of the first capacity. Where the default policy was
    replayed beside LRU and plain Belady, `trace.TRACE.CAPACITY.default_gap_closed` is how far it comes from
    the first to the second. Raises ConfigError.
    """
    capacities = tuple(dict.fromkeys(capacities or CAPACITIES.get(name, OTHER_CAPACITIES)))
    policies = tuple(dict.fromkeys(policies or POLICIES))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"no policy is called {policy!r}; known are {', '.join(POLICIES)}")
    if min(capacities) < 1:
        raise ConfigError(f"a capacity is at least one block, got {min(capacities)}")
    with Steps(f"trace {name}", len(capacities) * len(policies) * _STEPS_PER_REPLAY) as steps:
        steps.step("reading", 0)
        trace = read_trace(name, data)
        rows: list[dict[str, Value]] = []
        ratios: dict[str, float] = {}
        checks: dict[str, bool] = {}
        for capacity in sorted(capacities):
            rates: dict[str, float] = {}
            for policy in policies:
                start = time.perf_counter()
                found = _replay(trace, capacity, policy, steps)
                seconds = time.perf_counter() - start
                rates[policy] = found.hit_rate
                rows.append(
                    {
                        "trace": trace.name,
                        "policy": policy,
                        "capacity": capacity,
                        "hit_rate": found.hit_rate,
                        "evictions": found.evictions,
                        "hit_tokens": found.hit_tokens,
                        "input_tokens": found.tokens,
                        "replay_seconds": seconds,
                    }
                )
                if capacity == capacities[0]:
                    ratios[f"trace.{policy}.hit_rate"] = found.hit_rate
                    ratios[f"trace.{policy}.evictions"] = found.evictions
                if len(capacities) > 1:
                    ratios[f"trace.{policy}.{capacity}.hit_rate"] = found.hit_rate
                known = REFERENCE.get((trace.name, policy, capacity))
                if known is not None:
                    checks[f"{policy}_{capacity}_equals_reference"] = round(found.hit_rate, 4) == known
            if {DEFAULT, "lru", "belady"} <= rates.keys():
                checks[f"default_{capacity}_at_least_lru"] = rates[DEFAULT] >= rates["lru"]
                if rates["belady"] > rates["lru"]:
                    closed = (rates[DEFAULT] - rates["lru"]) / (rates["belady"] - rates["lru"])
                    ratios[f"trace.{trace.name}.{capacity}.default_gap_closed"] = closed
    return Report("trace", rows, ratios, checks)


def _replay(trace: Trace, capacity: int, policy: str, steps: Steps) -> Replay:
    text = f"{policy}, {capacity:,} blocks"
    total = len(trace.requests)
    shown = 0

    def advance(done: int) -> None:
        nonlocal shown
        due = done * _STEPS_PER_REPLAY // total
        if due > shown:
            steps.step(text, due - shown)
            shown = due

    if policy.startswith("belady"):
        return replay_belady(trace, capacity, leaf=policy == "belady-leaf", advance=advance)
    if policy in RIVALS:
        return replay_rival(trace, capacity, policy, advance=advance)
    return replay_policy(trace, capacity, policy, advance=advance)


def plot(report: Report) -> Figure:
    """Hit rate over capacity, one line a policy, Belady's ceiling dashed."""
    figure, axes = new_figure()
    for policy in dict.fromkeys(str(row["policy"]) for row in report.rows):
        points = [(row["capacity"], row["hit_rate"]) for row in report.rows if row["policy"] == policy]
        axes.plot(
            [float(x or 0) for x, _ in points],
            [100 * float(y or 0) for _, y in points],
            marker="o",
            linestyle="--" if policy.startswith("belady") else "-",
            color=_color(policy),
            linewidth=2.2 if policy in PRODUCT else 1.0,
            alpha=1.0 if policy in PRODUCT else 0.8,
            label=policy,
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("tokens found, % of all input tokens")
    axes.set_title(f"Hit rate on {report.rows[0]['trace']}", loc="left")
    axes.legend(frameon=False)
    return figure


def _color(policy: str) -> str | None:
    if policy.startswith("belady"):
        return "0.45"
    return {"reuse-leaf": "C3", "lru-leaf": "C0", "lru": "0.1"}.get(policy)
