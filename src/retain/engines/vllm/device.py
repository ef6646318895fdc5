"""Ordering copies behind what the engine computes: streams and events on CUDA, nothing to do on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Ordering(Protocol):
    """A way to run copies after the work that was submitted before a mark."""

    def mark(self) -> object:
        """A point in the engine's work, taken in its own thread."""

    def run(self, after: object, copy: Callable[[], T]) -> T:
        """Run a copy behind that point, in any thread; its bytes are there when this returns."""


class Immediate:
    """The CPU's: what was submitted has been done."""

    def mark(self) -> object:
        return None

    def run(self, after: object, copy: Callable[[], T]) -> T:
        return copy()


class SideStream:
    """CUDA's: copies go on a stream of their own, behind an event of the engine's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def run(self, after: object, copy: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            result = copy()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
        return result


def ordering(device: torch.device) -> Ordering:
    return SideStream(device) if device.type == "cuda" else Immediate()
