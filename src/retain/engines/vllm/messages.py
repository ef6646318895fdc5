"""What the scheduler's side tells the workers' side each step, and what these report back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from retain.identity import Media
from retain.model import ModelSpec

from .tables import Table


@dataclass(frozen=True)
class Load:
    """Load a request's tokens [start, stop) from the hit of `ticket`; `resident`: all of it is in memory."""

    request: str
    ticket: bytes
    model: int
    start: int
    stop: int
    resident: bool
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Save:
    """Keep the block of `tokens` (u32le) at position `first` behind `parent`; its pages are held."""

    job: int
    model: int
    space: bytes
    parent: bytes
    tokens: bytes
    first: int
    media: tuple[Media, ...]
    tables: tuple[Table, ...]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """One step's work. `models` are introduced once, under the numbers that loads and saves name.

    `idle` steps compute nothing. Loads of requests in `cancelled` need not be finished.
    """

    models: list[tuple[int, ModelSpec]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    idle: bool = False


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers finished since the last report: saves (how many workers), requests whose load failed.

    A saved job's pages may be used for something else.
    """

    saved: dict[int, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        if not isinstance(other, Report):
            raise TypeError(f"a report cannot be joined with a {type(other).__name__}")
        for job, count in other.saved.items():
            self.saved[job] = self.saved.get(job, 0) + count
        self.failed |= other.failed
        return self
