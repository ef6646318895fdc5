"""Capture: blocks are copied out of llama.cpp as they are completed, and committed by a thread behind the
requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from retain.block import Block, array_shapes, make_header
from retain.cache import BlockCache
from retain.codecs.base import container
from retain.engines.report import Report
from retain.engines.writing import Writer, write
from retain.identity import TAIL_TOKENS, Chain, Tokens, as_tokens
from retain.model import ModelSpec

from .host import Host
from .native import version
from .state import Array

PRODUCER = f"retain-llamacpp/0.1 llama-cpp-python/{version()}"


class Recorder:
    """Stores one request's blocks as they are completed, and at most one tail when it ends.

    `advance` and `finish` are called where the sequence's owner runs it. Blocks before `kept` tokens came
    from the cache and are not stored again.
    """

    def __init__(
        self,
        writer: Writer,
        cache: BlockCache,
        host: Host,
        chain: Chain,
        report: Report,
        sequence: int,
        kept: int,
        partial: tuple[Block, int] | None,
        inherits: tuple[str, bytes | None],
        kept_as: ModelSpec,
    ) -> None:
        """`partial` is the last kept block and how many of its first tokens were used, where that is not all
        of a block; `inherits` are fidelity and lineage of what is computed behind the kept tokens,
        `kept_as` is the spec in whose dtype blocks are stored."""
        self._writer = writer
        self._cache = cache
        self._host = host
        self._chain = chain
        self._report = report
        self._sequence = sequence
        self._kept = kept
        self._inherits = inherits
        self._kept_as = kept_as
        self._next = kept // chain.block_tokens
        self._parent = chain.parent(self._next)
        self._held = kept
        self._arrays: dict[str, Array] | None = None
        if kept % chain.block_tokens and partial is not None:
            # A sliding layer may hold less than the block's beginning: it is taken from where it came.
            block, used = partial
            for name, array in self._open().items():
                array[:, :, :used] = block.arrays[name][:, :, :used]

    def advance(self, tokens: Sequence[int] | Tokens, computed: int, *, all_of_it: bool = False) -> None:
        """Copy out what is complete of the first `computed` tokens, at the latest before a layer's window has
        passed it."""
        size = self._chain.block_tokens
        while self._held < computed:
            end = min((self._next + 1) * size, computed)
            whole = end == (self._next + 1) * size
            # A full layer keeps its rows: its blocks are copied once, whole.
            due = self._host.layout.window and end - self._held >= self._host.step
            if not (whole or due or all_of_it):
                return
            first = self._next * size
            for start in range(self._held, end, self._host.step):
                stop = min(end, start + self._host.step)
                self._host.capture(self._sequence, start, stop, first, self._open())
            self._held = end
            if whole:
                self._hand_over(tokens, size)
                self._next += 1

    def finish(self, tokens: Sequence[int] | Tokens, computed: int) -> None:
        """Hand over the last complete blocks and the tail."""
        first = computed // self._chain.block_tokens * self._chain.block_tokens
        length = (computed - first) // TAIL_TOKENS * TAIL_TOKENS
        self.advance(tokens, first + length, all_of_it=True)
        if length > 0 and first + length > self._kept:
            self._hand_over(tokens, length)

    def _open(self) -> dict[str, Array]:
        """The arrays of the block that is being completed."""
        if self._arrays is None:
            spec = self._host.spec
            header = make_header(
                spec,
                space=self._chain.space,
                parent=self._parent,
                tokens=np.zeros(self._chain.block_tokens, np.uint32),
                first=self._next * self._chain.block_tokens,
            )
            kind = container(spec.dtype)
            self._arrays = {name: np.empty(shape, kind) for name, shape in array_shapes(header).items()}
        return self._arrays

    def _hand_over(self, tokens: Sequence[int] | Tokens, count: int) -> None:
        first = self._next * self._chain.block_tokens
        ids = as_tokens(tokens[first : first + count])
        arrays, self._arrays = self._open(), None
        header = make_header(
            self._kept_as,
            space=self._chain.space,
            parent=self._parent,
            tokens=ids,
            first=first,
            fidelity=self._inherits[0],
            lineage=self._inherits[1],
            producer=PRODUCER,
        )
        if count == self._chain.block_tokens:
            self._parent = header.key

        def fill(kept: Mapping[str, Array]) -> None:
            for name, array in kept.items():
                np.copyto(array, arrays[name][:, :, :count], casting="same_kind")

        def store() -> None:
            self._report.written += write(self._cache, header, ids, fill)

        self._writer.submit(self._chain, store)
