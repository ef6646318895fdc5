"""One request as the scheduler's side follows it: whose KV it is, what was found, loading and stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retain.cache import Hit, Planner
from retain.engines import handover
from retain.identity import BLOCK_TOKENS, Chain, Media, Tokens, block_key, digest, root_key
from retain.model import ModelSpec


@dataclass(frozen=True)
class Whose:
    """What a request's KV belongs to: the model (and its number among the engine's), and the space."""

    number: int
    spec: ModelSpec
    space: bytes


@dataclass
class Tracked:
    """A request between its arrival and its end."""

    request: Any
    whose: Whose
    media: tuple[Media, ...]
    reads: bool
    stores: bool
    keys: list[bytes] = field(default_factory=list)
    hit: Hit | None = None
    reads_as: int | None = None
    """The number of the model whose KV was found, where that is another variant than the request's."""
    looked_at: float = 0.0
    looked_for: int = 0
    """How many tokens the last lookup asked for."""
    start: int = 0
    """Tokens that vLLM held itself when it last asked: a load begins behind them."""
    loading: bool = False
    failed: bool = False
    """A load of this request failed once: it is computed, and nothing is loaded for it again."""
    next: int = 0
    """The first block that is still to be stored."""
    patience: float | None = None
    """Until when (time.monotonic) to wait for tokens that another engine has promised."""
    seen: list[list[int]] = field(default_factory=list)
    """By group, all blocks the request ever had: vLLM's tables have null blocks where a window moved on."""

    @property
    def tokens(self) -> int:
        return int(self.request.num_tokens)

    def chain(self) -> Chain:
        """The request's tokens so far, with the keys of their full blocks."""
        ids = self.ids(0, self.tokens)
        full = ids.size // BLOCK_TOKENS
        self.reach(full)
        return Chain(self.whose.space, ids, BLOCK_TOKENS, tuple(self.keys[:full]), self.media)

    def reach(self, count: int) -> None:
        """Compute the keys of the first `count` blocks, as far as they are not known."""
        if self.request.resumable:  # the last token of a session's turn may be taken back
            del self.keys[self.next :]
        for index in range(len(self.keys), count):
            start = index * BLOCK_TOKENS
            ids = self.ids(start, start + BLOCK_TOKENS)
            self.keys.append(block_key(self.parent(index), ids, self.media, start))

    def parent(self, index: int) -> bytes:
        """The key before block `index`, whose predecessors' keys are known."""
        return self.keys[index - 1] if index else root_key(self.whose.space)

    def ids(self, start: int, stop: int) -> Tokens:
        """Token ids of [start, stop)."""
        return np.asarray(self.request._all_token_ids[start:stop], np.uint32)

    def awaited(self, planner: Planner) -> int:
        """How many first tokens another engine has promised to store, as long as they are waited for."""
        promised = handover.promised(self.request.kv_transfer_params)
        if not promised:
            return 0
        now = time.monotonic()
        if self.patience is None:
            self.patience = now + handover.patience(planner, self.whose.spec, promised)
        return promised if now < self.patience else 0

    def remember(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The request's blocks by group, also those that have left a window since."""
        if not self.seen:
            self.seen = [list(table) for table in tables]
            return self.seen
        for seen, table in zip(self.seen, tables, strict=True):
            for index, block in enumerate(table):
                if index == len(seen):
                    seen.append(block)
                elif block:
                    seen[index] = block
        return self.seen

    def release(self) -> None:
        """Give up what was found, where it is not loading."""
        hit, self.hit = self.hit, None
        if hit is not None:
            hit.release()

    def found(self, hit: Hit, wanted: int) -> None:
        """Take the result of a lookup."""
        self.release()
        self.hit = hit
        self.looked_at = time.monotonic()
        self.looked_for = wanted


def media_of(request: Any) -> tuple[Media, ...]:
    """The pictures, sounds and the like in a request's prompt, by the digest of their content."""
    return tuple(
        Media(
            int(feature.mm_position.offset),
            int(feature.mm_position.length),
            digest("retain/media", str(feature.modality), str(feature.mm_hash or feature.identifier)),
        )
        for feature in request.mm_features
    )
