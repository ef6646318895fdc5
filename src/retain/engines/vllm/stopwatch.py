"""How fast the engine computes, told to the planner: steps that compute one request alone are timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from retain.cache import Planner
from retain.model import ModelSpec

from .requests import Tracked

OBSERVED_TOKENS = 128
"""A step that computes at least so many tokens of one request alone tells how fast this engine computes."""


class Stopwatch:
    """Runs from the scheduling of such a step to the report of its end."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._running: tuple[float, ModelSpec, int, int] | None = None

    def start(self, output: Any, requests: Mapping[str, Tracked]) -> None:
        """A step was scheduled."""
        self.cancel()
        scheduled = output.num_scheduled_tokens
        if len(scheduled) != 1 or output.total_num_scheduled_tokens < OBSERVED_TOKENS:
            return
        name, count = next(iter(scheduled.items()))
        tracked = requests.get(name)
        if tracked is not None:
            first = int(tracked.request.num_computed_tokens)
            self._running = (time.perf_counter(), tracked.whose.spec, first, count)

    def stop(self) -> None:
        """The step has ended."""
        if self._running is not None:
            started, spec, first, count = self._running
            self._planner.observe_prefill(spec, first, count, time.perf_counter() - started)
            self._running = None

    def cancel(self) -> None:
        """Something else happened meanwhile: the time would say nothing."""
        self._running = None
