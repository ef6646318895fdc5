"""Tables: which of a group's blocks hold which tokens of a request, as sent from scheduler to workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

NULL = 0
"""vLLM's null block: it stands where a sliding window needs nothing. It is never read or written."""


@dataclass(frozen=True)
class Table:
    """The blocks of one group from block number `first` of the request on, each of `block_tokens` tokens."""

    first: int
    block_tokens: int
    ids: Ids

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of the tokens [start, stop) that lie in real blocks."""
        at = start
        while at < stop:
            end = min(stop, (at // self.block_tokens + 1) * self.block_tokens)
            if self._real(at):
                while end < stop and self._real(end):
                    end = min(stop, end + self.block_tokens)
                yield at, end
            at = end

    def covers(self, start: int, stop: int) -> bool:
        """Whether every token of [start, stop) lies in a real block."""
        return list(self.runs(start, stop)) == [(start, stop)]

    def pages(self, page_tokens: int) -> Ids:
        """The kernel's pages, where it splits a block into several of `page_tokens` tokens."""
        split = self.block_tokens // page_tokens
        if split == 1:
            return self.ids
        return (self.ids[:, None] * split + np.arange(split)).reshape(-1)

    def _real(self, token: int) -> bool:
        index = token // self.block_tokens - self.first
        return 0 <= index < self.ids.size and int(self.ids[index]) != NULL


def cut(ids: Sequence[int], block_tokens: int, start: int, stop: int) -> Table:
    """The table of the tokens [start, stop) out of all of a request's blocks."""
    first = start // block_tokens
    last = -(-stop // block_tokens)
    return Table(first, block_tokens, np.array(ids[first:last], np.int64))
