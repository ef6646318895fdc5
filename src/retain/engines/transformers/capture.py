"""Capture: what the model computed goes to the cache, copied and committed by one thread behind the
requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import transformers
from transformers.cache_utils import Cache as EngineCache

from retain.block import make_header
from retain.cache import BlockCache
from retain.codecs.base import Array
from retain.engines.report import Report
from retain.engines.writing import Writer, write
from retain.identity import TAIL_TOKENS, Chain, Tokens, as_tokens
from retain.model import ModelSpec

from .geometry import Geometry, Views
from .layers import layers_of

PRODUCER = f"retain-transformers/0.1 transformers/{transformers.__version__}"


class Recorder:
    """Stores one request's blocks as they are completed, and at most one tail when it ends.

    `tokens` grows with the answer; KV of its first `computed` tokens is in the engine's cache. Blocks before
    `kept` tokens came from the cache and are not stored again. At most `limit` tokens are stored. `kept_as`
    is the spec in whose dtype they are stored, `inherits` are fidelity and lineage of what is computed behind
    the kept tokens.
    """

    def __init__(
        self,
        writer: Writer,
        cache: BlockCache,
        geometry: Geometry,
        chain: Chain,
        report: Report,
        *,
        kept: int,
        limit: int | None,
        tails: bool,
        kept_as: ModelSpec,
        inherits: tuple[str, bytes | None],
    ) -> None:
        self._writer = writer
        self._cache = cache
        self._geometry = geometry
        self._chain = chain
        self._report = report
        self._kept = kept
        self._kept_as = kept_as
        self._limit = limit
        self._tails = tails
        self._inherits = inherits
        self._next = kept // chain.block_tokens
        self._parent = chain.parent(self._next)

    def begin(self, source: EngineCache) -> None:
        """Tell the layers from which position on their rows are still to be stored."""
        for layer in layers_of(source):
            layer.hold = self._next * self._chain.block_tokens

    def advance(self, source: EngineCache, tokens: Sequence[int] | Tokens, computed: int) -> None:
        """Hand over the blocks that are complete now."""
        size = self._chain.block_tokens
        done = self._storable(computed)
        while (self._next + 1) * size <= done:
            self._hand_over(source, tokens, self._next * size, size)
            self._next += 1
            self.begin(source)

    def finish(self, source: EngineCache, tokens: Sequence[int] | Tokens, computed: int) -> None:
        """Hand over the last complete blocks and the tail."""
        self.advance(source, tokens, computed)
        first = self._next * self._chain.block_tokens
        length = (self._storable(computed) - first) // TAIL_TOKENS * TAIL_TOKENS
        if self._tails and length > 0 and first + length > self._kept:
            self._hand_over(source, tokens, first, length)

    def _storable(self, computed: int) -> int:
        return computed if self._limit is None else min(computed, self._limit)

    def _hand_over(self, source: EngineCache, tokens: Sequence[int] | Tokens, first: int, count: int) -> None:
        ids = as_tokens(tokens[first : first + count])
        views = self._geometry.views(source, first, first + count)
        self._writer.submit(self._chain, lambda: self._store(ids, first, views))

    def _store(self, ids: Tokens, first: int, views: Views) -> None:
        """In the writer's thread, block after block: the parent of the next is the key of this one."""
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
        if header.count == self._chain.block_tokens:
            self._parent = header.key

        def fill(arrays: Mapping[str, Array]) -> None:
            with torch.no_grad():
                self._geometry.copy_out(views, arrays)

        self._report.written += write(self._cache, header, ids, fill)
