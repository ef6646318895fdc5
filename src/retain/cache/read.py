"""Reading: a hit's blocks, from memory in place, from lower tiers through the arena, each verified on its way
in.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from retain.block import (
    Block,
    Expected,
    assemble,
    cut,
    decode_into,
    open_object,
    raw_layout,
    verify_object,
)
from retain.errors import InvalidObject, StoreError, StoreUnavailable
from retain.header import BlockHeader
from retain.model import Slice

from .ledger import Ledger
from .place import Arena
from .planner import Planner
from .results import Lease, Part, Query, Source
from .tier import Tier
from .workers import Task, Workers

READERS = min(4, os.cpu_count() or 1)


class Reader:
    """Gives blocks as read-only views of the arena, with the leases that keep them there."""

    def __init__(self, tiers: Sequence[Tier], arena: Arena, ledger: Ledger, planner: Planner) -> None:
        self._tiers = tuple(tiers)
        self._arena = arena
        self._ledger = ledger
        self._planner = planner
        self._workers = Workers("retain-read", READERS)

    def read(self, query: Query, parts: Sequence[Part], deadline: float) -> tuple[list[Block], list[Lease]]:
        """The blocks of `parts` up to the first that cannot be had by `deadline` (perf_counter seconds)."""
        start = time.perf_counter()
        tasks = [[self._start(source, part.key, query) for source in part.sources] for part in parts]
        blocks: list[Block] = []
        leases: list[Lease] = []
        read: dict[int, list[int]] = {}
        for part, pending in zip(parts, tasks, strict=True):
            got: list[tuple[Block, Lease]] = []
            for source, task in zip(part.sources, pending, strict=True):
                piece = self._finish(source, task, deadline)
                if piece is None:
                    break
                got.append(piece)
                sums = read.setdefault(source.tier, [0, 0])
                sums[0] += 1
                sums[1] += source.size
            if len(got) < len(part.sources):
                for _, lease in got:
                    lease.release()
                break
            try:
                blocks.append(_shape([block for block, _ in got], query.wanted))
            except ValueError as error:
                self._ledger.failure("the slices of a block do not fit together", error)
                break
            leases.extend(lease for _, lease in got)
        for row in tasks[len(blocks) :]:
            for task in row:
                task.when_done(_give_back)
        seconds = time.perf_counter() - start
        for number, (count, size) in read.items():
            self._ledger.count("loaded_bytes", size)
            if len(read) == 1:
                self._planner.observe_load(self._tiers[number].name, count, size, seconds)
        return blocks, leases

    def close(self) -> None:
        self._workers.stop()

    def _start(self, source: Source, key: bytes, query: Query) -> Task[tuple[Block, Lease]]:
        if source.tier == 0:
            task = Task(lambda: self._resident(source.slot, key, query))
            task.run()
            return task
        tier = self._tiers[source.tier]
        name = tier.object_name(source.slot)
        # The fetch outlives this read when the deadline passes, so it holds the object by a lease of its own.
        tier.hold(source.slot)
        return self._workers.submit(lambda: self._fetch(tier, source, name, key, query))

    def _finish(
        self, source: Source, task: Task[tuple[Block, Lease]], deadline: float
    ) -> tuple[Block, Lease] | None:
        tier = self._tiers[source.tier]
        try:
            return task.result(max(0.0, deadline - time.perf_counter()))
        except TimeoutError as error:
            self._ledger.failure(f"the {tier.name} tier did not answer before the deadline", error)
        except InvalidObject as error:
            self._ledger.failure(f"a damaged object was removed from the {tier.name} tier", error)
        except StoreError as error:
            self._ledger.failure(f"an object of the {tier.name} tier could not be read", error)
        except Exception as error:
            self._ledger.failure(
                f"reading from the {tier.name} tier failed", f"{type(error).__name__}: {error}"
            )
        return None

    def _resident(self, slot: int, key: bytes, query: Query | None) -> tuple[Block, Lease]:
        """The block in a slot of the arena that the caller has leased."""
        memory = self._arena.tier
        memory.hold(slot)
        try:
            view = self._arena.view(slot)
            if view is None:
                raise StoreUnavailable("the block left the arena")
            frame, arrays = open_object(view)
            _accept(frame.header, key, query)
            tokens = arrays.pop("tokens")
            block = Block(frame.header, tokens, arrays)
        except BaseException:
            memory.release([slot])
            raise
        return block, _lease_of(block, memory, slot)

    def _fetch(self, tier: Tier, source: Source, name: str, key: bytes, query: Query) -> tuple[Block, Lease]:
        try:
            raw_name = _raw_name(name)
            memory = self._arena.tier
            slot = memory.find(raw_name)
            if slot is not None and memory.acquire(slot, key):  # another reader was faster
                try:
                    return self._resident(slot, key, query)
                finally:
                    memory.release([slot])
            return self._promote(tier, source, name, raw_name, key, query)
        finally:
            tier.release([source.slot])

    def _promote(
        self, tier: Tier, source: Source, name: str, raw_name: str, key: bytes, query: Query
    ) -> tuple[Block, Lease]:
        """Read an object of a lower tier into the arena, or beside it where there is no room."""
        if tier.form(source.slot).codec == "raw":
            try:
                place = self._arena.reserve(raw_name, source.size, 0.0)
            except KeyError:
                place = None
            buffer = memoryview(bytearray(source.size)) if place is None else place
            try:
                header = self._read_verified(tier, source, name, key, query, buffer)
            except BaseException:
                if place is not None:
                    self._arena.abandon(raw_name)
                raise
            return self._settle(header, raw_name, buffer, placed=place is not None)
        data = memoryview(bytearray(source.size))
        self._read_verified(tier, source, name, key, query, data)
        frame, streams = open_object(data)
        tokens = streams.pop("tokens")
        layout = raw_layout(replace(frame.header, codec="raw"))
        try:
            place = self._arena.reserve(raw_name, layout.size, 0.0)
        except KeyError:
            place = None
        buffer = memoryview(bytearray(layout.size)) if place is None else place
        try:
            decode_into(frame, tokens, streams, layout, buffer)
            layout.write_header(buffer)
        except BaseException as error:
            if place is not None:
                self._arena.abandon(raw_name)
            if isinstance(error, InvalidObject):
                tier.remove(source.slot)
            raise
        return self._settle(layout.header, raw_name, buffer, placed=place is not None)

    def _read_verified(
        self, tier: Tier, source: Source, name: str, key: bytes, query: Query, buffer: memoryview
    ) -> BlockHeader:
        got = tier.store.read_into(name, buffer)
        try:
            if got != source.size:
                raise InvalidObject(f"{name} has {got} bytes where {source.size} were kept")
            frame, _ = verify_object(buffer)
            if frame.header.name != name:
                raise InvalidObject(f"under {name} lies another object, {frame.header.name}")
            _accept(frame.header, key, query)
            return frame.header
        except InvalidObject:
            tier.remove(source.slot)
            raise

    def _settle(
        self, header: BlockHeader, raw_name: str, buffer: memoryview, *, placed: bool
    ) -> tuple[Block, Lease]:
        if placed:
            slot = self._arena.commit(header, raw_name, len(buffer), leased=True)
            self._ledger.count("promoted_blocks")
            memory = self._arena.tier
            try:
                return self._resident(slot, header.key, None)
            finally:
                memory.release([slot])
        _, arrays = open_object(buffer.toreadonly())
        tokens = arrays.pop("tokens")
        return Block(header, tokens, arrays), Lease(lambda: None)


def _accept(header: BlockHeader, key: bytes, query: Query | None) -> None:
    """Raise InvalidObject unless the block is what the query asked for."""
    if query is None:
        return
    Expected(key, query.spec).check(header)
    if query.fidelity == "exact" and header.fidelity != "exact":
        raise InvalidObject(f"the block is {header.fidelity}, but exact was asked for")


def _shape(pieces: Sequence[Block], wanted: Slice) -> Block:
    if len(pieces) == 1 and pieces[0].header.slice == wanted:
        return pieces[0]
    return cut(pieces[0], wanted) if len(pieces) == 1 else assemble(pieces, wanted)


def _raw_name(name: str) -> str:
    parts = name.split(".")
    parts[3] = "raw"
    return ".".join(parts)


def _lease_of(block: Block, memory: Tier, slot: int) -> Lease:
    """A lease that also ends by itself when the last view of the block's bytes is gone."""
    lease = Lease(lambda: memory.release([slot]))
    weakref.finalize(block.tokens.base, lease.release)
    return lease


def _give_back(task: Task[tuple[Block, Lease]]) -> None:
    try:
        _, lease = task.result(0.0)
    except BaseException:
        return
    lease.release()
