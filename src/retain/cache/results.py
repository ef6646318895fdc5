"""What the calls of a Cache take and give back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from retain.block import Block
from retain.codecs.base import Array
from retain.header import BlockHeader
from retain.identity import TAIL_TOKENS, Chain, Tokens
from retain.model import ModelSpec, Slice
from retain.stores.base import Health


@dataclass(frozen=True)
class Query:
    """What a reader asks for: the tokens, the model that will use the KV, and how much of it.

    `slice` None asks for the whole. `fidelity` is the lowest accepted. At most `limit` tokens are used:
    engines pass the prompt's length less one, for the last token has to be computed in any case.
    """

    chain: Chain
    spec: ModelSpec
    slice: Slice | None = None
    fidelity: str = "exact"
    limit: int | None = None

    @property
    def wanted(self) -> Slice:
        return self.slice or self.spec.whole

    @property
    def tokens(self) -> int:
        """How many tokens could be used at the most."""
        total = int(self.chain.tokens.size)
        return total if self.limit is None else max(0, min(total, self.limit))


@dataclass(frozen=True)
class Source:
    """One object that a part of a hit is read from: which tier, and its place in the tier's index."""

    tier: int
    slot: int
    slice: Slice
    size: int


@dataclass(frozen=True)
class Part:
    """A block of a hit: its key, where its tokens begin, how many of its first tokens are used, the objects
    to read.
    """

    key: bytes
    first: int
    tokens: int
    sources: tuple[Source, ...]


def span(parts: Sequence[Part]) -> tuple[int, int]:
    """Where the tokens of a hit's parts begin, and how many they are."""
    return (parts[0].first if parts else 0), sum(part.tokens for part in parts)


class Lease:
    """A claim on blocks: they stay while it lasts. It ends when released, when its owner is gone, or at its
    deadline.
    """

    def __init__(self, release: Callable[[], None], deadline: float | None = None) -> None:
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()
        self.deadline = deadline

    @property
    def held(self) -> bool:
        return self._release is not None

    def forget(self) -> None:
        """The claim has passed to somebody else, who will end it."""
        with self._lock:
            self._release = None

    def release(self) -> None:
        """End the claim. Idempotent."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(frozen=True, eq=False)
class Hit:
    """What a lookup found: the longest usable prefix. Release it, or hand it to `Cache.load`, which does.

    `handle` is the number under which the hit's lease can be claimed by another process or thread.
    """

    query: Query
    parts: tuple[Part, ...]
    found: int
    tokens_by_tier: Mapping[str, int]
    lease: Lease
    handle: int = 0

    def __post_init__(self) -> None:
        # A caller that drops the hit without a word must not keep blocks from being evicted.
        weakref.finalize(self, self.lease.release)

    @property
    def tokens(self) -> int:
        """Tokens that a load of this hit gives."""
        return sum(part.tokens for part in self.parts)

    def release(self) -> None:
        """Give the lease back without loading. Idempotent."""
        self.lease.release()

    def ticket(self) -> bytes:
        """What another thread or process of the same cache needs to load this hit: see `claim`.

        The lease stays with this hit: keep it until every holder of the ticket has loaded, then release it.
        """
        rows = [(part.key, part.first, part.tokens, part.sources[0].tier) for part in self.parts]
        return msgspec.msgpack.encode((self.handle, self.query.fidelity, rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_ticket(ticket: bytes, spec: ModelSpec, part: Slice | None) -> Hit:
    """The hit of a ticket, its lease somebody else's. Raises ValueError for bytes that are no ticket."""
    wanted = part or spec.whole
    try:
        handle, fidelity, rows = msgspec.msgpack.decode(ticket, type=_Ticket)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a ticket of a hit: {error}") from error
    parts = tuple(
        Part(key, first, tokens, (Source(tier, 0, wanted, 0),)) for key, first, tokens, tier in rows
    )
    nothing = Chain(b"", np.empty(0, np.uint32), TAIL_TOKENS, ())
    query = Query(nothing, spec, part, fidelity)
    return Hit(query, parts, sum(each.tokens for each in parts), {}, Lease(lambda: None), handle)


_Ticket = tuple[int, str, list[tuple[bytes, int, int, int]]]


@dataclass(frozen=True, eq=False)
class Loaded:
    """Verified blocks in order. Their arrays are read-only views, valid until `close`.

    `lengths[i]` is how many of the first tokens of `blocks[i]` are to be used; only the last may be less than
    its count.
    """

    blocks: tuple[Block, ...]
    lengths: tuple[int, ...]
    tokens_by_tier: Mapping[str, int]
    seconds: float
    leases: tuple[Lease, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def close(self) -> None:
        """End the leases of the blocks. Idempotent."""
        for lease in self.leases:
            lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class StoreResult:
    """Whether a block is now kept, and why or why not: stored, present, busy, no room, closed, failed."""

    kept: bool
    reason: str


class Reservation:
    """A writable place for a raw block. Fill `tokens` and `arrays`, then `commit` or
    `abandon`.
    """

    def __init__(
        self,
        header: BlockHeader,
        tokens: Tokens,
        arrays: Mapping[str, Array],
        commit: Callable[[], StoreResult],
        abandon: Callable[[], None],
    ) -> None:
        self.header = header
        self.tokens = tokens
        self.arrays = dict(arrays)
        self._commit = commit
        self._abandon: Callable[[], None] | None = abandon
        # `abandon` is a no-op after a commit, so a reservation that is dropped without a word gives its place
        # back.
        weakref.finalize(self, abandon)

    def fill(self, block: Block) -> None:
        """Copy a block's tokens and numbers into the place."""
        self.tokens[:] = block.tokens
        for name, array in self.arrays.items():
            array[...] = block.arrays[name]

    def commit(self) -> StoreResult:
        """Make the block visible to lookups and start writing it to the tiers below."""
        if self._abandon is None:
            raise ValueError("this reservation has ended")
        self._abandon = None
        self.arrays = {}
        return self._commit()

    def abandon(self) -> None:
        """Give the place back. Idempotent."""
        abandon, self._abandon = self._abandon, None
        self.arrays = {}
        if abandon is not None:
            abandon()


@dataclass(frozen=True)
class Tally:
    """How much a call removed or pinned: blocks (a block may lie in several tiers), objects and bytes in all,
    objects and bytes by tier, and what it could not reach, in words.
    """

    blocks: int = 0
    objects: int = 0
    bytes: int = 0
    tiers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missed: tuple[str, ...] = ()


def tally_of(
    keys: Collection[bytes], tiers: Mapping[str, tuple[int, int]], missed: Sequence[str] = ()
) -> Tally:
    """The tally of these keys, from the objects and bytes of each tier."""
    objects = sum(count for count, _ in tiers.values())
    return Tally(len(keys), objects, sum(size for _, size in tiers.values()), dict(tiers), tuple(missed))


@dataclass(frozen=True)
class Nearest:
    """The kept prompt of the same space that agrees longest with a chain: `common` tokens, then `kept` where
    it differs.

    `kept` holds at most one block's tokens from position `common` on, and is empty where the kept prompt ends
    there.
    """

    common: int
    kept: Tokens


@dataclass(frozen=True)
class TierStats:
    """A tier at one moment. Sizes in bytes; of a shared tier, what is known of it here.

    `health` is the state of a remote tier's server, None for other tiers.
    """

    kind: str
    objects: int
    bytes: int
    capacity: int
    leased: int
    pinned: int
    codec: str
    health: Health | None = None
    pinned_bytes: int = 0
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Objects and bytes by tenant; under "" those of no tenant, or of one that is not known yet."""

    unreachable: tuple[int, int] = (0, 0)
    """Objects and bytes that no prompt can reach, for a block before them is gone from every tier."""


@dataclass(frozen=True)
class Stats:
    """Counters since the cache was opened, failures by reason, and each tier's state.

    `temporary_bytes` are held for objects that are on their way in: none while nothing is going on.
    """

    counters: Mapping[str, int]
    failures: Mapping[str, int]
    tiers: Mapping[str, TierStats]
    pending_writes: int = 0
    temporary_bytes: int = 0
