"""Eviction policies that Retain is compared with: plain caches of equal blocks, by their papers."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Protocol

LONG_BLOCKS = 100.0
"""The depth, in blocks, at which recomputing a block costs twice what it does at the start of a prompt."""


class Rival(Protocol):
    """A cache of block numbers that counts what it evicts."""

    evictions: int

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int, depth: int) -> None:
        """Touch a block, the `depth`-th of its request; one that is not held is inserted."""


class Lfu:
    """Least frequently used, and of those the least recently; counts end with the block's stay."""

    def __init__(self, capacity: int) -> None:
        self.evictions = 0
        self._capacity = capacity
        self._held: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._clock = 0

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def use(self, block: int, depth: int) -> None:
        self._clock += 1
        self._held[block] = (self._worth(block, depth), self._clock)
        heapq.heappush(self._heap, (*self._held[block], block))
        if len(self._held) > self._capacity:
            self._evict()
        if len(self._heap) > 4 * self._capacity + 1000:
            self._heap = [(*order, each) for each, order in self._held.items()]
            heapq.heapify(self._heap)

    def _worth(self, block: int, depth: int) -> float:
        return self._held[block][0] + 1 if block in self._held else 1

    def _evict(self) -> float:
        while True:
            worth, tick, block = heapq.heappop(self._heap)
            if self._held.get(block) == (worth, tick):
                del self._held[block]
                self.evictions += 1
                return worth


class Gdsf(Lfu):
    """Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69, 1998) by seconds of recomputing a byte.

    Blocks are of one size; recomputing one costs more the deeper it lies, since attention looks back further.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, int] = {}
        self._inflation = 0.0

    def _worth(self, block: int, depth: int) -> float:
        self._uses[block] = self._uses.get(block, 0) + 1 if block in self._held else 1
        return self._inflation + self._uses[block] * (1 + depth / LONG_BLOCKS)

    def _evict(self) -> float:
        self._inflation = super()._evict()
        return self._inflation


class Arc:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003, figure 4)."""

    def __init__(self, capacity: int) -> None:
        self.evictions = 0
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._often_gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def use(self, block: int, depth: int) -> None:
        if block in self._once:
            del self._once[block]
        elif block in self._often:
            del self._often[block]
        elif block in self._once_gone:
            step = max(1.0, len(self._often_gone) / len(self._once_gone))
            self._target = min(float(self._capacity), self._target + step)
            self._replace(False)
            del self._once_gone[block]
        elif block in self._often_gone:
            step = max(1.0, len(self._once_gone) / len(self._often_gone))
            self._target = max(0.0, self._target - step)
            self._replace(True)
            del self._often_gone[block]
        else:
            self._make_room()
            self._once[block] = None
            return
        self._often[block] = None

    def _make_room(self) -> None:
        seen_once = len(self._once) + len(self._once_gone)
        if seen_once >= self._capacity:
            if self._once_gone:
                self._once_gone.popitem(last=False)
                self._replace(False)
            else:
                self._once.popitem(last=False)
                self.evictions += 1
        else:
            if seen_once + len(self._often) + len(self._often_gone) >= 2 * self._capacity:
                self._often_gone.popitem(last=False)
            self._replace(False)

    def _replace(self, for_often_gone: bool) -> None:
        once = len(self._once)
        if once + len(self._often) < self._capacity:
            return
        self.evictions += 1
        if once and (once > self._target or (for_often_gone and once == self._target) or not self._often):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._often_gone[self._often.popitem(last=False)[0]] = None


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023, algorithm 1): a small queue of a tenth, a main one, ghosts."""

    def __init__(self, capacity: int) -> None:
        self.evictions = 0
        self._capacity = capacity
        self._small_share = max(1, capacity // 10)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int, depth: int) -> None:
        if block in self._uses:
            self._uses[block] = min(3, self._uses[block] + 1)
            return
        while len(self._uses) >= self._capacity:
            if len(self._small) >= self._small_share or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        self._uses[block] = 0
        if block in self._gone:
            del self._gone[block]
            self._main.append(block)
        else:
            self._small.append(block)

    def _evict_small(self) -> None:
        while self._small:
            block = self._small.popleft()
            if self._uses[block] > 1:
                self._uses[block] = 0
                self._main.append(block)
                continue
            del self._uses[block]
            self.evictions += 1
            self._gone[block] = None
            if len(self._gone) > self._capacity - self._small_share:
                self._gone.popitem(last=False)
            return
        self._evict_main()

    def _evict_main(self) -> None:
        while True:
            block = self._main.popleft()
            if not self._uses[block]:
                del self._uses[block]
                self.evictions += 1
                return
            self._uses[block] -= 1
            self._main.append(block)


class Sieve:
    """SIEVE (Zhang et al., NSDI 2024, algorithm 1): a queue, and a hand that spares what was used again."""

    def __init__(self, capacity: int) -> None:
        self.evictions = 0
        self._capacity = capacity
        self._used: dict[int, bool] = {}
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def use(self, block: int, depth: int) -> None:
        if block in self._used:
            self._used[block] = True
            return
        if len(self._used) >= self._capacity:
            self._evict()
        self._used[block] = False
        self._newer[block], self._older[block] = None, self._newest
        if self._newest is not None:
            self._newer[self._newest] = block
        else:
            self._oldest = block
        self._newest = block

    def _evict(self) -> None:
        hand = self._hand if self._hand is not None else self._oldest
        while hand is not None and self._used[hand]:
            self._used[hand] = False
            hand = self._newer[hand]
            hand = hand if hand is not None else self._oldest
        if hand is None:
            raise AssertionError("a full queue has an oldest block")
        newer, older = self._newer.pop(hand), self._older.pop(hand)
        if newer is not None:
            self._older[newer] = older
        else:
            self._newest = older
        if older is not None:
            self._newer[older] = newer
        else:
            self._oldest = newer
        del self._used[hand]
        self._hand = newer
        self.evictions += 1


RIVALS: dict[str, type[Lfu | Arc | S3Fifo | Sieve]] = {
    "lfu": Lfu,
    "gdsf": Gdsf,
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
}
