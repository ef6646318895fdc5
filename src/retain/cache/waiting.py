"""Waiting: blocks in memory that a lower tier takes when they leave memory or are used, or not at all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from retain.header import BlockHeader

from .tier import Tier

REMEMBERED = 1 << 16
"""How many blocks that left memory unread are known again when they are stored anew: about 10 MB."""


@dataclass
class _Block:
    header: BlockHeader
    tiers: list[Tier]
    reused: bool


class Waiting:
    """Which tiers wait for which block, by the block's name. Safe from several threads.

    What left memory unread is remembered for a while: a block that is stored a second time is one that is
    asked for.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._names: dict[bytes, set[str]] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, header: BlockHeader, tiers: Sequence[Tier], *, reused: bool) -> None:
        """These tiers wait for a block."""
        with self._lock:
            self._blocks[header.name] = _Block(header, list(tiers), reused)
            self._names.setdefault(header.key, set()).add(header.name)

    def seen(self, name: str) -> bool:
        """Whether a block left memory unread before, so that it is not new."""
        with self._lock:
            return name in self._left

    def used(self, keys: Sequence[bytes]) -> list[tuple[BlockHeader, list[Tier]]]:
        """Blocks of these keys are used: each with the tiers that take it for that."""
        if not self._names:
            return []
        found = []
        with self._lock:
            for name in [name for key in keys for name in self._names.get(key, ())]:
                block = self._blocks[name]
                block.reused = True
                now = [tier for tier in block.tiers if tier.rules.writes != "evicted"]
                if now:
                    block.tiers = [tier for tier in block.tiers if tier not in now]
                    found.append((block.header, now))
                    if not block.tiers:
                        self._forget(name)
        return found

    def leaves(self, name: str) -> tuple[BlockHeader | None, list[Tier], int]:
        """A block is about to leave memory: it, the tiers that take it, and how many decline it."""
        with self._lock:
            block = self._blocks.get(name)
            if block is None:
                return None, [], 0
            self._forget(name)
            takes = [tier for tier in block.tiers if tier.rules.admit == "all" or block.reused]
            if len(takes) < len(block.tiers):
                self._left[name] = None
                self._left.move_to_end(name)
                while len(self._left) > REMEMBERED:
                    self._left.popitem(last=False)
            return block.header, takes, len(block.tiers) - len(takes)

    def due(self) -> Iterator[tuple[BlockHeader, list[Tier]]]:
        """What would be written if everything left memory now, taken out: each block with its tiers."""
        for name in list(self._blocks):
            with self._lock:
                block = self._blocks.get(name)
                if block is None:
                    continue
                takes = [tier for tier in block.tiers if tier.rules.admit == "all" or block.reused]
                block.tiers = [tier for tier in block.tiers if tier not in takes]
                if not block.tiers:
                    self._forget(name)
            if takes:
                yield block.header, takes

    def cancel(self, tiers: Collection[Tier], which: Callable[[BlockHeader], bool]) -> None:
        """These tiers wait no longer for the blocks for which `which(header)` is true."""
        with self._lock:
            for name, block in list(self._blocks.items()):
                if which(block.header):
                    block.tiers = [tier for tier in block.tiers if tier not in tiers]
                    if not block.tiers:
                        self._forget(name)

    def _forget(self, name: str) -> None:
        block = self._blocks.pop(name)
        names = self._names[block.header.key]
        names.discard(name)
        if not names:
            del self._names[block.header.key]
