"""The waiting line in front of the engine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from retain.gateway.waiting import Closed, Full, Job, Line
from tests.gateway.conftest import eventually


def test_jobs_run_in_order_one_at_a_time_and_a_failed_one_does_not_end_the_line() -> None:
    order: list[int] = []
    gate = threading.Event()

    def work(number: int) -> None:
        gate.wait(5)
        order.append(number)
        if number == 1:
            raise RuntimeError("one fails")

    async def run() -> None:
        line = Line(3)
        loop = asyncio.get_running_loop()
        first = Job(lambda _: work(0), loop)
        line.enter(first)
        assert eventually(lambda: line.running == 1)
        rest = [Job(lambda _, n=n: work(n), loop) for n in (1, 2, 3)]  # type: ignore[misc]
        for job in rest:
            line.enter(job)
        with pytest.raises(Full):
            line.enter(Job(lambda _: work(4), loop))
        assert (line.running, line.waiting) == (1, 3)
        assert line.leave(rest[1]), "it was still waiting"
        assert not line.leave(first), "it runs"
        assert first.cancelled
        line.close()
        with pytest.raises(Closed):
            line.enter(Job(lambda _: None, loop))
        gate.set()
        assert line.wait_idle(5)
        assert order == [0, 1, 3], "those inside are served though the line is closed"

    asyncio.run(run())


def test_an_event_for_a_loop_that_has_ended_cancels_its_job() -> None:
    async def make() -> Job:
        return Job(lambda _: None, asyncio.get_running_loop())

    job = asyncio.run(make())
    job.emit("anything")
    assert job.cancelled
