"""Reading: a hit's blocks, from memory in place, from lower tiers through the arena, each verified on its way
in.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retain.block import (
    Block,
    Expected,
    assemble,
    cut,
    decode_into,
    object_views,
    open_object,
    raw_layout,
    verify_object,
)
from retain.codecs import CODECS
from retain.codecs.ladder.measured import is_switched_off
from retain.errors import ForeignObject, InvalidObject, StoreError, StoreUnavailable
from retain.fidelity import accepts, decoded_lineage, held_codec, quality_of
from retain.header import BlockHeader, Frame, object_name, split_name
from retain.model import ModelSpec, Slice

from .forms import Form
from .ledger import Ledger
from .place import Arena
from .planner import Planner
from .results import Lease, Part, Query, Source
from .tier import Tier
from .workers import Task, Workers

READERS = min(4, os.cpu_count() or 1)


class Gone(StoreError):
    """A shared tier's server keeps the object no more, which is its good right."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One object of a part, in the arena and leased; `slot` is None where it lies beside it for want of
    room.
    """

    block: Block
    lease: Lease
    slot: int | None
    tier: int
    size: int


@dataclass(frozen=True)
class Want:
    """What every object that is read must satisfy."""

    spec: ModelSpec
    fidelity: str

    def check(self, header: BlockHeader, key: bytes) -> None:
        """Raise InvalidObject unless the block is what was asked for."""
        Expected(key, self.spec).check(header)
        if header.fidelity == "lossy":
            quality = quality_of(held_codec(header.codec, header.parameters), header.lineage)
            accepted = accepts(self.fidelity, quality)
            if quality is not None and is_switched_off(header.kin, quality):
                raise ForeignObject(f"{quality} is switched off for this model: its loss was too large")
        else:
            accepted = header.fidelity in ("exact", self.fidelity) or self.fidelity not in ("exact", "kin")
        if not accepted:
            raise ForeignObject(f"the block is {header.fidelity}, but {self.fidelity} was asked for")


class Reader:
    """Gives blocks as read-only views of the arena, with the leases that keep them there."""

    def __init__(self, tiers: Sequence[Tier], arena: Arena, ledger: Ledger, planner: Planner) -> None:
        self._tiers = tuple(tiers)
        self._arena = arena
        self._ledger = ledger
        self._planner = planner
        self._workers = Workers("retain-read", READERS)
        self.promoted: Callable[[BlockHeader, int, int], None] | None = None
        """Told of each block that was read from a lower tier into the arena: its header, slot, tier."""

    def read(self, query: Query, parts: Sequence[Part], deadline: float) -> tuple[list[Block], list[Lease]]:
        """The blocks of `parts` up to the first that cannot be had by `deadline` (perf_counter seconds)."""
        rows = self.pieces(Want(query.spec, query.fidelity), parts, deadline)
        blocks: list[Block] = []
        leases: list[Lease] = []
        for row in rows:
            try:
                blocks.append(shape([piece.block for piece in row], query.wanted))
            except ValueError as error:
                self._ledger.failure("the slices of a block do not fit together", error)
                break
            leases.extend(piece.lease for piece in row)
        release(rows[len(blocks) :])
        return blocks, leases

    def pieces(self, want: Want, parts: Sequence[Part], deadline: float) -> list[tuple[Piece, ...]]:
        """The objects of each of `parts`, up to the first part that cannot be had by `deadline`."""
        start = time.perf_counter()
        tasks = [[self._start(source, part.key, want) for source in part.sources] for part in parts]
        rows: list[tuple[Piece, ...]] = []
        for part, pending in zip(parts, tasks, strict=True):
            row = tuple(
                piece
                for source, task in zip(part.sources, pending, strict=True)
                if (piece := self._finish(source, task, deadline)) is not None
            )
            if len(row) < len(part.sources):
                break
            rows.append(row)
        for late in tasks[len(rows) :]:
            for task in late:
                task.when_done(_give_back)
        ended = time.perf_counter()
        self._observe(rows, ended - start)
        if ended >= deadline:
            self._observe_late(parts, len(rows), ended - start)
        return rows

    def _observe(self, rows: Sequence[Sequence[Piece]], seconds: float) -> None:
        sizes: dict[int, list[int]] = {}
        for piece in (piece for row in rows for piece in row):
            sizes.setdefault(piece.tier, []).append(piece.size)
        for number, each in sizes.items():
            self._ledger.count("loaded_bytes", sum(each))
            if len(sizes) == 1:  # else the time would be one tier's blamed on another
                self._planner.observe_load(self._tiers[number].name, len(each), sum(each), seconds)

    def _observe_late(self, parts: Sequence[Part], done: int, seconds: float) -> None:
        tiers = {source.tier for part in parts[done:] for source in part.sources}
        if len(tiers) == 1 and done < len(parts):
            asked = [source.size for part in parts for source in part.sources if source.tier in tiers]
            name = self._tiers[tiers.pop()].name
            self._planner.observe_load(name, len(asked), sum(asked), seconds, complete=False)

    def close(self) -> None:
        self._workers.stop()

    def _start(self, source: Source, key: bytes, want: Want) -> Task[Piece]:
        if source.tier == 0:
            task = Task(lambda: self._resident(source, source.slot, key, want))
            task.run()
            return task
        tier = self._tiers[source.tier]
        name = tier.object_name(source.slot)
        # The fetch outlives this read when the deadline passes, so it holds the object by a lease of its own.
        tier.hold(source.slot)
        return self._workers.submit(lambda: self._fetch(tier, source, name, key, want))

    def _finish(self, source: Source, task: Task[Piece], deadline: float) -> Piece | None:
        tier = self._tiers[source.tier]
        try:
            return task.result(max(0.0, deadline - time.perf_counter()))
        except TimeoutError as error:
            self._ledger.failure(f"the {tier.name} tier did not answer before the deadline", error)
        except Gone:
            self._ledger.count("gone_objects")
        except ForeignObject as error:
            self._ledger.failure(f"an object of the {tier.name} tier is not for this reader", error)
        except InvalidObject as error:
            self._ledger.failure(f"a damaged object was removed from the {tier.name} tier", error)
        except StoreError as error:
            self._ledger.failure(f"an object of the {tier.name} tier could not be read", error)
        except Exception as error:
            self._ledger.failure(
                f"reading from the {tier.name} tier failed", f"{type(error).__name__}: {error}"
            )
        return None

    def _resident(self, source: Source, slot: int, key: bytes, want: Want) -> Piece:
        """The block in a slot of the arena that the caller has leased."""
        memory = self._arena.tier
        memory.hold(slot)
        try:
            view = self._arena.view(slot)
            if view is None:
                raise StoreUnavailable("the block left the arena")
            frame, arrays = open_object(view)
            want.check(frame.header, key)
            tokens = arrays.pop("tokens")
            block = Block(frame.header, tokens, arrays)
        except BaseException:
            memory.release([slot])
            raise
        return Piece(block, _lease_of(block, memory, slot), slot, source.tier, source.size)

    def _fetch(self, tier: Tier, source: Source, name: str, key: bytes, want: Want) -> Piece:
        try:
            raw_name = _raw_name(name)
            memory = self._arena.tier
            slot = memory.find(raw_name)
            if slot is not None and memory.acquire(slot, key):  # another reader was faster
                try:
                    return self._resident(source, slot, key, want)
                finally:
                    memory.release([slot])
            return self._promote(tier, source, name, raw_name, key, want)
        finally:
            tier.release([source.slot])

    def _promote(self, tier: Tier, source: Source, name: str, raw_name: str, key: bytes, want: Want) -> Piece:
        """Read an object of a lower tier into the arena, or beside it where there is no room."""
        if tier.form(source.slot).codec == "raw":
            try:
                place = self._arena.reserve(raw_name, source.size, 0.0)
            except KeyError:
                place = None
            buffer = memoryview(bytearray(source.size)) if place is None else place
            try:
                frame = self._read_verified(tier, source, name, key, want, buffer)
            except BaseException:
                if place is not None:
                    self._arena.abandon(raw_name)
                raise
            return self._settle(source, frame, raw_name, buffer, placed=place is not None)
        data = memoryview(bytearray(source.size))
        frame = self._read_verified(tier, source, name, key, want, data)
        streams = object_views(data, frame)
        tokens = streams.pop("tokens")
        layout = raw_layout(frame.header)
        raw_name = layout.header.name
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
            if isinstance(error, ForeignObject):
                tier.forget(source.slot)
            elif isinstance(error, InvalidObject):
                tier.remove(source.slot)
            raise
        return self._settle(source, layout.frame, raw_name, buffer, placed=place is not None)

    def _read_verified(
        self, tier: Tier, source: Source, name: str, key: bytes, want: Want, buffer: memoryview
    ) -> Frame:
        try:
            got = tier.store.read_into(name, buffer)
            if got == 0 and tier.shared is not None:
                tier.forget(source.slot)
                raise Gone(name)
            if got != source.size:
                raise InvalidObject(f"{name} has {got} bytes where {source.size} were kept")
            frame, _ = verify_object(buffer)
            if frame.header.name != name:
                raise InvalidObject(f"under {name} lies another object, {frame.header.name}")
            want.check(frame.header, key)
            tier.learn(name, frame.header)
            return frame
        except ForeignObject:
            tier.forget(source.slot)
            raise
        except InvalidObject:
            tier.remove(source.slot)
            raise

    def _settle(
        self, source: Source, frame: Frame, raw_name: str, buffer: memoryview, *, placed: bool
    ) -> Piece:
        """The block in a filled buffer, made visible to others if it lies in the arena."""
        arrays = object_views(buffer.toreadonly(), frame)
        block = Block(frame.header, arrays.pop("tokens"), arrays)
        if not placed:
            return Piece(block, Lease(lambda: None), None, source.tier, source.size)
        slot = self._arena.commit(frame.header, raw_name, len(buffer), leased=True)
        self._ledger.count("promoted_blocks")
        if self.promoted is not None and source.tier > 1:
            self.promoted(frame.header, slot, source.tier)
        return Piece(block, _lease_of(block, self._arena.tier, slot), slot, source.tier, source.size)


def release(rows: Sequence[Sequence[Piece]]) -> None:
    """End the leases of pieces."""
    for piece in (piece for row in rows for piece in row):
        piece.lease.release()


def shape(pieces: Sequence[Block], wanted: Slice) -> Block:
    """The wanted slice out of the pieces of one block. Raises ValueError where something is missing."""
    if len(pieces) == 1 and pieces[0].header.slice == wanted:
        return pieces[0]
    return cut(pieces[0], wanted) if len(pieces) == 1 else assemble(pieces, wanted)


def _raw_name(name: str) -> str:
    """The name in the arena of what an object decodes to, as far as its own name tells."""
    key, form = split_name(name)
    held = Form.parse(form)
    lineage = held.lineage
    if CODECS[held.codec].lossy:
        lineage = decoded_lineage(held.codec, held.lineage)
    return object_name(key, held.variant, held.slice, "raw", lineage)


def _lease_of(block: Block, memory: Tier, slot: int) -> Lease:
    """A lease that also ends by itself when the last view of the block's bytes is gone."""
    lease = Lease(lambda: memory.release([slot]))
    weakref.finalize(block.tokens.base, lease.release)
    return lease


def _give_back(task: Task[Piece]) -> None:
    try:
        task.result(0.0).lease.release()
    except Exception:
        return  # it failed, and so it leases nothing
