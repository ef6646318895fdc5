"""Bench `chaos`: what breaks under Retain while it is used, and what that costs: a miss, never more.

docs/chaos.md says what is broken, and what is promised meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from retain.bench.chaos.engine import ENGINE_FAULT, ENGINE_KILLS, kill_engines
from retain.bench.chaos.faults import FULL, QUICK, Fault, all_faults
from retain.bench.chaos.run import Outcome, run_faults
from retain.bench.progress import Steps
from retain.bench.report import Report, Value, new_figure
from retain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(quick: bool = False, only: Sequence[str] = (), seed: int = 1, vllm: str | None = None) -> Report:
    """Try every fault, or those whose title (`redis: half responses`) has one of the words of `only` in it.

    `vllm` is the Python of a venv with vLLM, whose engine is then killed too. Raises ConfigError where there
    is no such fault.
    """
    logging.getLogger("retain").addHandler(logging.NullHandler())  # that a daemon is gone is no news here
    scale = QUICK if quick else FULL
    engine = vllm is not None and (not only or any(each.lower() in ENGINE_FAULT.title for each in only))
    faults = chosen(only, or_none=engine)
    kills = ENGINE_KILLS if engine else 0
    with Steps("chaos", sum(fault.rounds(scale) for fault in faults) + kills) as steps:
        outcomes = list(run_faults(faults, scale, seed, steps.step))
        if vllm is not None and engine:
            outcomes.append(kill_engines(vllm, kills, seed, steps.step))
    return report(outcomes)


def chosen(only: Sequence[str], *, or_none: bool = False) -> list[Fault]:
    """The faults whose titles have one of `only` in them; all, where that is empty. Raises ConfigError."""
    faults = all_faults()
    found = [
        fault for fault in faults if not only or any(each.lower() in fault.title.lower() for each in only)
    ]
    if not found and not or_none:
        titles = ", ".join(fault.title for fault in faults)
        raise ConfigError(f"no fault is called {' or '.join(only)}; there are: {titles}")
    return found


def report(outcomes: Sequence[Outcome]) -> Report:
    """Rows, one a fault, and the checks."""
    tried = [each for each in outcomes if not each.skipped]
    return Report(
        "chaos",
        [_row(each) for each in outcomes],
        {f"wait_over_deadline.{bed}": ratio for bed, ratio in _worst(tried).items()},
        {
            "no_wrong_output": not any(each.seen.wrong for each in tried),
            "no_missed_deadline": not any(each.seen.late for each in tried),
            "no_exception": not any(each.seen.raised for each in tried),
            "nothing_leaked": not any(each.held for each in tried),
            "works_again_afterwards": all(each.back for each in tried),
        },
    )


def plot(found: Report) -> Figure:
    """The longest wait under each fault, beside its deadline."""
    rows = [row for row in found.rows if row["worst_wait_seconds"] is not None]
    figure, axes = new_figure(9.0, 2.0 + 0.22 * len(rows))
    places = range(len(rows))
    axes.barh(places, [float(row["deadline_seconds"] or 0) for row in rows], color="0.9", label="deadline")
    axes.barh(
        places, [float(row["worst_wait_seconds"] or 0) for row in rows], height=0.5, label="longest wait"
    )
    axes.set_yticks(places, [str(row["fault"]) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="lower right")
    return figure


def _row(outcome: Outcome) -> dict[str, Value]:
    seen = outcome.seen
    kind, seconds, deadline = seen.worst
    return {
        "fault": outcome.fault.title,
        "rounds": outcome.rounds,
        "lookups": seen.counts["lookups"],
        "blocks_checked": seen.counts["blocks"],
        "blocks_stored": seen.counts["store_stored"],
        "failures_counted": outcome.counted,
        "worst_wait": kind,
        "worst_wait_seconds": seconds if seen.waits else None,
        "deadline_seconds": deadline if seen.waits else None,
        "wrong": len(seen.wrong),
        "late": len(seen.late),
        "raised": len(seen.raised),
        "took_seconds": outcome.seconds,
        "outcome": f"skipped: {outcome.skipped}"
        if outcome.skipped
        else "; ".join(outcome.troubles) or "as promised",
    }


def _worst(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for each in outcomes:
        _, seconds, deadline = each.seen.worst
        found[each.fault.bed] = max(found.get(each.fault.bed, 0.0), seconds / deadline)
    return found
