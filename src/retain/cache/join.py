"""Joining: the slices of a block that several ranks stored become one whole block, which then goes below."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from retain.block import Block, assemble, open_object, raw_layout
from retain.errors import StoreError
from retain.header import BlockHeader
from retain.model import Slice

from .forms import together
from .ledger import Ledger
from .place import Arena

JOIN_SECONDS = 2.0
"""How long a slice waits for the others, in memory, before it goes to the tiers below by itself: ranks save
within a step or two of each other, and those of another node never come.
"""


@dataclass(eq=False)
class _Set:
    """The slices of one block that are here, each leased, and the header of the whole."""

    whole: BlockHeader
    deadline: float
    slices: list[tuple[BlockHeader, int]] = field(default_factory=list)
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        return together([header.slice for header, _ in self.slices], self.whole.slice)


class Joiner:
    """Waits for the slices of blocks and joins them in the arena. Safe from several threads.

    `below` takes what is to be written to lower tiers: a header and a slot, leased once.
    """

    def __init__(self, arena: Arena, ledger: Ledger, below: Callable[[BlockHeader, int], None]) -> None:
        self._arena = arena
        self._ledger = ledger
        self._below = below
        self._sets: dict[str, _Set] = {}
        self._joining: _Set | None = None
        self._running = False
        self._closed = False
        self._changed = threading.Condition()

    def add(self, header: BlockHeader, slot: int) -> None:
        """Take over one lease on a slot that holds a slice of a block."""
        whole = replace(header, slice=Slice(0, len(header.layers)))
        with self._changed:
            if self._closed:
                self._below(header, slot)
                return
            found = self._sets.get(whole.name)
            if found is not None and found.whole != whole:  # not of one and the same computation
                self._below(header, slot)
                return
            if found is None:
                found = self._sets[whole.name] = _Set(whole, time.monotonic() + JOIN_SECONDS)
            found.slices.append((header, slot))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="retain-join", daemon=True).start()
            self._changed.notify_all()

    def cancel(self, which: Callable[[BlockHeader], bool]) -> None:
        """Give up the blocks for which `which(header)` is true: nothing of them is made or written any
        more.
        """
        with self._changed:
            for name in [name for name, each in self._sets.items() if which(each.whole)]:
                self._let_go(self._sets.pop(name))
            if self._joining is not None and which(self._joining.whole):
                self._joining.cancelled = True

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be joined; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sets and self._joining is None, timeout)

    def close(self) -> None:
        """Let what waits go below as it is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(5.0)

    # in the thread, which lives as long as something waits

    def _run(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                if found is None:
                    self._running = False
                    return
                complete = found.complete
                self._joining = found
            joined = False
            try:
                joined = complete and self._join(found)
            except Exception as error:
                self._ledger.failure("slices could not be joined", f"{type(error).__name__}: {error}")
            with self._changed:
                self._joining = None
                if joined or found.cancelled:
                    self._let_go(found)
                else:
                    for header, slot in found.slices:
                        self._below(header, slot)
                self._changed.notify_all()

    def _next(self) -> _Set | None:
        """The next set that is complete or has waited long enough, taken out; None where none is left."""
        while self._sets:
            now = time.monotonic()
            for name, each in self._sets.items():
                if self._closed or each.deadline <= now or each.complete:
                    return self._sets.pop(name)
            self._changed.wait(min(each.deadline for each in self._sets.values()) - now)
        return None

    def _join(self, found: _Set) -> bool:
        """Make the whole block and take its slices out of sight; False where there is no room for it."""
        memory = self._arena.tier
        whole = found.whole
        layout = raw_layout(whole)
        try:
            buffer = self._arena.reserve(whole.name, layout.size, 0.0)
        except KeyError:
            return True  # it is here already
        if buffer is None:
            return False
        try:
            tokens, arrays = layout.views(buffer)
            blocks = [self._block(header, slot) for header, slot in found.slices]
            tokens[:] = blocks[0].tokens
            assemble(blocks, whole.slice, into=arrays)
            layout.write_header(buffer)
        except BaseException:
            self._arena.abandon(whole.name)
            raise
        slot = self._arena.commit(whole, whole.name, layout.size, leased=True)
        self._ledger.count("joined_blocks")
        with self._changed:
            if found.cancelled:
                memory.remove(slot)
                memory.release([slot])
            else:
                self._below(whole, slot)
        for _, each in found.slices:
            memory.remove(each)
        self._ledger.count("joined_slices", len(found.slices))
        return True

    def _block(self, header: BlockHeader, slot: int) -> Block:
        view = self._arena.view(slot)
        if view is None:
            raise StoreError("a slice left the arena while it was leased")
        _, arrays = open_object(view)
        return Block(header, arrays.pop("tokens"), arrays)

    def _let_go(self, found: _Set) -> None:
        self._arena.tier.release([slot for _, slot in found.slices])
