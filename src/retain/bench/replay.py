"""Replays a trace against limited capacity: by the index's own policies, by others, and by Belady's."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain._native import Index
from retain.bench.rivals import RIVALS
from retain.bench.traces import Trace

Advance = Callable[[int], None]
"""Told after each request how many are done."""


@dataclass(frozen=True)
class Replay:
    """What a policy achieved: tokens found as leading blocks, of how many in all, and blocks evicted."""

    hit_tokens: int
    tokens: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


_ROOT = b"\xff" * 32
"""The parent of every request's first block; no block number gives this key."""

_NONE = 0xFFFFFFFF


def replay_policy(
    trace: Trace, capacity: int, policy: str, *, advance: Advance = lambda done: None
) -> Replay:
    """Replay by a policy of the product's own index.

    A request's leading blocks at hand are its hit. Then every block of it is touched in chain order: a new
    one is inserted, and while there are more than `capacity`, the policy's victim goes.
    """
    index = Index(policy)
    hits = evictions = 0
    for done, request in enumerate(trace.requests, 1):
        keys = _keys(request.blocks)
        slots = index.lookup(keys, [0])
        absent = np.flatnonzero(slots == _NONE)
        leading = int(absent[0]) if absent.size else slots.size
        hits += leading
        index.touch(slots[:leading])
        for place in range(leading, slots.size):
            key = keys[32 * place : 32 * place + 32]
            slot = index.find(key, 0)
            if slot is not None:
                index.touch([slot])
                continue
            parent = keys[32 * place - 32 : 32 * place] if place else _ROOT
            index.insert(key, 0, 0, parent, 1)
            while len(index) > capacity:
                victim = index.victim()
                if victim is None:
                    raise AssertionError("nothing is leased in a replay, so something can always go")
                index.remove(victim)
                evictions += 1
        advance(done)
    return Replay(hits * trace.block_tokens, trace.tokens, evictions)


def replay_rival(trace: Trace, capacity: int, policy: str, *, advance: Advance = lambda done: None) -> Replay:
    """Replay by one of RIVALS, touching the same blocks in the same order."""
    cache = RIVALS[policy](capacity)
    hits = 0
    for done, request in enumerate(trace.requests, 1):
        blocks = request.blocks.tolist()
        hits += next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
        for depth, block in enumerate(blocks):
            cache.use(block, depth)
        advance(done)
    return Replay(hits * trace.block_tokens, trace.tokens, cache.evictions)


def _keys(blocks: npt.NDArray[np.int64]) -> bytes:
    """Block numbers as keys of 32 bytes each."""
    keys = np.zeros((blocks.size, 4), np.int64)
    keys[:, 0] = blocks
    return keys.tobytes()


def replay_belady(
    trace: Trace, capacity: int, *, leaf: bool = False, advance: Advance = lambda done: None
) -> Replay:
    """Evict the block whose next use is the most requests away (Belady, IBM Systems Journal 5(2), 1966).

    Blocks used again by the same request are a tie: plain Belady evicts the one touched first; `leaf` the one
    touched last, which is the better ceiling for prefixes, where a block without its parent is worth nothing.
    """
    blocks = np.concatenate([request.blocks for request in trace.requests] or [np.empty(0, np.int64)])
    counts = [request.blocks.size for request in trace.requests]
    owner = np.repeat(np.arange(len(counts)), counts)
    upcoming = _next_use(blocks, owner).tolist()
    numbers = blocks.tolist()
    resident: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = evictions = at = 0
    for done, count in enumerate(counts, 1):
        touched = numbers[at : at + count]
        hits += _leading(touched, resident)
        for number in touched:
            rank = -at if leaf else at
            resident[number] = (upcoming[at], rank)
            heapq.heappush(heap, (-upcoming[at], rank, number))
            at += 1
            if len(resident) > capacity:
                while True:
                    use, rank, victim = heapq.heappop(heap)
                    if resident.get(victim) == (-use, rank):
                        break
                del resident[victim]
                evictions += 1
        advance(done)
    return Replay(hits * trace.block_tokens, trace.tokens, evictions)


def _leading(touched: list[int], resident: dict[int, tuple[int, int]]) -> int:
    for place, number in enumerate(touched):
        if number not in resident:
            return place
    return len(touched)


def _next_use(blocks: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each touch the request that touches the block next; a number beyond all where none does."""
    upcoming = np.full(blocks.size, np.iinfo(np.int64).max, np.int64)
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[:-1]] == blocks[order[1:]]
    upcoming[order[:-1][again]] = owner[order[1:][again]]
    return upcoming
