"""Generation: an answer as it is made, and whose it is; the same for every engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from retain.cache import BlockCache
from retain.engines.report import Report
from retain.engines.wishes import Step
from retain.identity import salt_of, space_of
from retain.model import ModelSpec


class Generation:
    """An answer as it is made: iterate for its steps. `report` grows with it; `close` ends it."""

    def __init__(self, steps: Iterator[Step], report: Report) -> None:
        self.report = report
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """End the generation and keep what it has completed. Idempotent."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def salt_for(cache: BlockCache, spec: ModelSpec, tenant: str | None, salt: str | None) -> bytes | None:
    """The salt of a tenant's request; the cache is told whose space it makes."""
    made = salt_of(tenant, salt)
    if tenant is not None:  # only here are both known, the name and the space
        cache.own(space_of(spec.kin, spec.adapter, made), tenant)
    return made
