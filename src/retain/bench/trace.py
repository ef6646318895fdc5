"""Bench `trace`: hit rates of the eviction policies on traces of real requests, below Belady's optimum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retain.bench.progress import Steps
from retain.bench.replay import Replay, replay_belady, replay_policy
from retain.bench.report import Report, Value, new_figure
from retain.bench.traces import Trace, read_trace
from retain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = ("lru", "lru-leaf", "belady", "belady-leaf")
DEFAULT_POLICIES = ("lru", "lru-leaf", "belady-leaf")
DEFAULT_CAPACITIES = (10_000, 1_000, 5_000, 20_000, 50_000)

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

    The ratios without a capacity in their name are those of the first capacity. Raises ConfigError.
    """
    capacities = tuple(dict.fromkeys(capacities or DEFAULT_CAPACITIES))
    policies = tuple(dict.fromkeys(policies or DEFAULT_POLICIES))
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
            for policy in policies:
                start = time.perf_counter()
                found = _replay(trace, capacity, policy, steps)
                seconds = time.perf_counter() - start
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
            color="0.45" if policy.startswith("belady") else None,
            label=policy,
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("tokens found, % of all input tokens")
    axes.set_title(f"Hit rate on {report.rows[0]['trace']}", loc="left")
    axes.legend(frameon=False)
    return figure
