"""Timing: wall and CPU seconds of work, interleaved so that a machine's moods fall on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Sample:
    """What one run took: wall seconds, and CPU seconds of all threads of the process together."""

    seconds: float
    cpu_seconds: float


def timed(work: Callable[[], object], servers: Sequence[int] = ()) -> Sample:
    """Run `work` once. The CPU time of the processes `servers` is counted with this one's."""
    clocks = [(~pid << 3) | 2 for pid in servers]  # Linux's clock of another process, clock_getcpuclockid(3)
    cpu = time.process_time_ns() + sum(map(time.clock_gettime_ns, clocks))
    wall = time.perf_counter_ns()
    work()
    ended = time.perf_counter_ns()
    spent = time.process_time_ns() + sum(map(time.clock_gettime_ns, clocks))
    return Sample((ended - wall) / 1e9, (spent - cpu) / 1e9)


@dataclass(frozen=True)
class Contender:
    """Work to be timed: `prepare(round)` untimed, then `work(round)` timed."""

    work: Callable[[int], object]
    prepare: Callable[[int], object] = lambda turn: None


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, warmups: int = 1, servers: Sequence[int] = ()
) -> dict[str, Sample]:
    """Run every contender once a round, each round beginning with the next one; the medians over the rounds.

    Rounds are numbered from 0, the warm-ups included, which are not counted.
    """
    names = list(contenders)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for turn in range(warmups + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contender = contenders[name]
            contender.prepare(turn)
            sample = timed(lambda work=contender.work, turn=turn: work(turn), servers)  # type: ignore[misc]
            if turn >= warmups:
                samples[name].append(sample)
    return {name: medians(taken) for name, taken in samples.items()}


def medians(samples: Sequence[Sample]) -> Sample:
    """The medians of wall and CPU seconds, each by itself."""
    return Sample(median(s.seconds for s in samples), median(s.cpu_seconds for s in samples))
