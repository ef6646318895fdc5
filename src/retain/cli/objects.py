"""The objects of disk tiers as commands see them: each with its header, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retain.address import TierAddress
from retain.errors import ConfigError, InvalidObject
from retain.stores.base import Store, StoredObject

if TYPE_CHECKING:
    from retain.header import BlockHeader

FIRST_READ_BYTES = 1 << 14
"""Enough for the header of most models; a longer one takes a second read."""


@dataclass(frozen=True)
class DiskTier:
    """An open disk tier and its folder."""

    path: Path
    store: Store


@dataclass(frozen=True)
class Listed:
    """One object: where it lies, what the store says of it, and its header or what is wrong with it."""

    tier: DiskTier
    stored: StoredObject
    header: BlockHeader | None
    problem: str | None = None


@contextmanager
def disk_tiers(addresses: Sequence[TierAddress]) -> Iterator[list[DiskTier]]:
    """The disk tiers among `addresses`, open. Raises ConfigError where there is none to look at."""
    from retain.stores.opening import open_store

    chosen = [(address.path, address) for address in addresses if address.path is not None]
    if not chosen:
        raise ConfigError(
            "none of the tiers is a disk tier, and memory tiers end with their process: give --tier disk:PATH"
        )
    tiers: list[DiskTier] = []
    try:
        for path, address in chosen:
            check_folder(address)
            tiers.append(DiskTier(path, open_store(address)))
        yield tiers
    finally:
        for tier in tiers:
            tier.store.close()


def check_folder(address: TierAddress) -> None:
    """Raise ConfigError where a disk tier's folder is not there: looking at a tier must not create it."""
    if address.path is not None and not address.path.is_dir():
        raise ConfigError(
            f"the folder {address.path} of the disk tier does not exist: nothing has been kept there yet"
        )


def listed(tiers: Sequence[DiskTier]) -> Iterator[Listed]:
    """Every object of the tiers, its header read but its content not verified."""
    for tier in tiers:
        for stored in tier.store.scan():
            try:
                yield Listed(tier, stored, read_header(tier.store, stored))
            except InvalidObject as error:
                yield Listed(tier, stored, None, str(error))


def read_header(store: Store, stored: StoredObject) -> BlockHeader:
    """The header of one object. Raises InvalidObject."""
    from retain.header import MAX_HEADER_BYTES, parse_frame

    data = read(store, stored.name, min(stored.size, FIRST_READ_BYTES))
    claimed = 8 + int.from_bytes(data[:8], "little")
    if len(data) < claimed <= min(stored.size, 8 + MAX_HEADER_BYTES):
        data = read(store, stored.name, claimed)
    return parse_frame(data).header


def read(store: Store, name: str, size: int) -> memoryview:
    """The first `size` bytes of an object, fewer if it ends before."""
    buffer = memoryview(bytearray(size))
    return buffer[: store.read_into(name, buffer)]
