"""Runs faults on their beds: what clients saw of each, how long they waited, what was left behind."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from retain.bench.chaos.beds import BEDS
from retain.bench.chaos.crew import CrewError, Seen
from retain.bench.chaos.faults import Fault, Round, Scale
from retain.bench.chaos.stack import Stack, StackError
from retain.errors import MissingDependency

MORE_WORDS = 3
"""How many examples of what should not have been are kept of each kind."""


@dataclass(frozen=True)
class Outcome:
    """What came of a fault. `counted`: failures that the daemon counted, the last one where several were
    killed; `held`: what was not given back; `back`: whether everything was in use again afterwards.
    `skipped` says why nothing was done.
    """

    fault: Fault
    rounds: int
    seconds: float
    seen: Seen
    held: Sequence[str]
    back: bool
    counted: int = 0
    skipped: str = ""

    @property
    def troubles(self) -> list[str]:
        """Everything that should not have been, in words."""
        seen = self.seen
        found = [*seen.wrong[:MORE_WORDS], *seen.late[:MORE_WORDS], *seen.raised[:MORE_WORDS], *self.held]
        return found if self.back else [*found, "nothing is loaded any more"]


def run_faults(
    faults: Iterable[Fault], scale: Scale, seed: int, said: Callable[[str, int], object]
) -> Iterator[Outcome]:
    """Try the faults, those of one bed on one stack; `said(text, rounds)` hears what comes, and what is done.

    Runs with the same seed break the same things, as far as processes come to the same points.
    """
    with tempfile.TemporaryDirectory(prefix="retain-chaos-") as folder:
        for number, (bed, of_bed) in enumerate(groupby(faults, lambda fault: fault.bed)):
            yield from _on_bed(bed, list(of_bed), scale, seed, Path(folder) / f"{bed}-{number}", said)


def _on_bed(
    bed: str,
    faults: Sequence[Fault],
    scale: Scale,
    seed: int,
    folder: Path,
    said: Callable[[str, int], object],
) -> Iterator[Outcome]:
    said(f"{bed}: starting", 0)
    with ExitStack() as opened:
        try:
            stack = opened.enter_context(BEDS[bed].opened(folder, seed))
        except MissingDependency as error:
            for fault in faults:
                said(f"{fault.title}: skipped", fault.rounds(scale))
                yield Outcome(fault, 0, 0.0, Seen(), (), True, skipped=str(error))
            return
        for fault in faults:
            yield _try(fault, stack, scale, random.Random(f"{seed} {fault.title}"), said)


def _try(
    fault: Fault, stack: Stack, scale: Scale, dice: random.Random, said: Callable[[str, int], object]
) -> Outcome:
    rounds = fault.rounds(scale)
    began = time.monotonic()
    done, counted = 0, 0
    held: list[str] = []
    back = False
    said(fault.title, 0)
    try:
        stack.crew.go()
        daemon, before = stack.failures()
        for _ in range(rounds):
            fault.inflict(Round(stack, dice, scale))
            done += 1
            said(fault.title, 1)
        held = stack.settle()
        last, counted = stack.failures()
        counted -= before if last == daemon else 0
        back = stack.back_to_work()
    except (StackError, CrewError) as error:
        said(fault.title, rounds - done)
        held = [*held, str(error)]
    return Outcome(fault, done, time.monotonic() - began, stack.crew.seen(), held, back, counted)
