"""Warming: kept blocks are brought up into memory before anybody asks for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from retain.errors import InvalidObject, StoreError
from retain.header import BlockHeader
from retain.model import ModelSpec

from .adopt import Adopter, read_head
from .ledger import Ledger
from .read import Reader, Want, release
from .results import Part, Source, Tally, tally_of
from .tier import Tier

PAGE = 4096

SECONDS = 30.0
"""How long one block is waited for, at the most."""


class Warmer:
    """Brings blocks up by their keys, whatever variant they were kept for."""

    def __init__(self, tiers: Sequence[Tier], reader: Reader, adopter: Adopter, ledger: Ledger) -> None:
        self._tiers = tuple(tiers)
        self._reader = reader
        self._adopter = adopter
        self._ledger = ledger

    def warm(self, keys: Sequence[bytes]) -> Tally:
        """Bring the blocks of these keys into memory, in this order, as far as they fit beside each other;
        what is in memory now, counted by the tier that it came from.
        """
        self._discover(keys)
        memory = self._tiers[0]
        counts: dict[str, tuple[int, int]] = {}
        found: list[bytes] = []
        nowhere = full = 0
        left = memory.capacity - memory.room.pinned_bytes
        for key in keys:
            tier = next((tier for tier in self._tiers if tier.holds(key)), None)
            if tier is None:
                nowhere += 1
                continue
            objects, size, used = self._bring(tier, key, left)
            if not objects:
                full += 1
                continue
            left -= used
            found.append(key)
            before = counts.get(tier.name, (0, 0))
            counts[tier.name] = (before[0] + objects, before[1] + size)
        missed = [f"{nowhere} blocks are kept nowhere that is known here"] if nowhere else []
        if full:
            missed.append(f"{full} blocks could not be read, or have no room beside the others")
        return tally_of(found, counts, missed)

    def _bring(self, tier: Tier, key: bytes, room: int) -> tuple[int, int, int]:
        """Objects and bytes of a key that are in memory after this, read from `tier` if need be, and how much
        of the room they take.
        """
        number = self._tiers.index(tier)
        objects = size = used = 0
        for slot in tier.same_key(key):
            with tier.lock:
                if not tier.acquire(slot, key):
                    continue
                source = Source(number, slot, tier.form(slot).slice, tier.index.record(slot).size)
            try:
                if used + _taken(source) <= room and (number == 0 or self._read(tier, source, key)):
                    objects, size, used = objects + 1, size + source.size, used + _taken(source)
            finally:
                tier.release([slot])
        return objects, size, used

    def _read(self, tier: Tier, source: Source, key: bytes) -> bool:
        try:
            frame, _ = read_head(tier, tier.object_name(source.slot))
        except (InvalidObject, StoreError) as error:
            self._ledger.failure(f"an object of the {tier.name} tier could not be read", error)
            return False
        if frame is None:
            return False
        want = Want(spec_of(frame.header), frame.header.fidelity)
        rows = self._reader.pieces(want, [Part(key, 0, 1, (source,))], time.perf_counter() + SECONDS)
        release(rows)
        return bool(rows)

    def _discover(self, keys: Sequence[bytes]) -> None:
        """Ask shared tiers that list what they have for what no index here knows."""
        unknown = {key for key in keys if not any(tier.holds(key) for tier in self._tiers)}
        for tier in self._tiers:
            if unknown and tier.shared is not None and tier.shared.writable:
                self._adopter.discover(tier, unknown)


def _taken(source: Source) -> int:
    """How much of the arena an object takes, which gives whole pages."""
    return -(-source.size // PAGE) * PAGE


def spec_of(header: BlockHeader) -> ModelSpec:
    """The model that a block was kept for."""
    known = (header.kin, header.variant, header.adapter)
    return ModelSpec(header.model, header.architecture, header.layers, header.dtype, *known)
