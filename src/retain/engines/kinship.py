"""Kinship: kept KV of a reader's own variant, and behind it of other variants that it may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from retain.block import Block
from retain.cache import BlockCache, Hit, Loaded, Query
from retain.dtypes import converted
from retain.errors import ForeignObject
from retain.fidelity import KINSHIPS, lineage_of
from retain.handshake import Peer, peers_of
from retain.identity import TAIL_TOKENS
from retain.model import ModelSpec


class Peers:
    """The variants that one engine may read beside its own, as the record of handshakes says when it is first
    asked; or those that it is given."""

    def __init__(self, producer: str, given: Sequence[Peer] | None = None) -> None:
        self._producer = producer
        self._given = None if given is None else tuple(given)
        self._known: dict[bytes, tuple[Peer, ...]] = {}

    def of(self, spec: ModelSpec) -> tuple[Peer, ...]:
        """The peers of a model."""
        if self._given is not None:
            return self._given
        if spec.variant not in self._known:
            self._known[spec.variant] = peers_of(spec, self._producer)
        return self._known[spec.variant]


@dataclass(frozen=True, eq=False)
class KinHit:
    """What a search found: a hit on the reader's own KV, and perhaps one of a peer's that reaches further.

    Release it, or load it, which does.
    """

    own: Hit
    other: Hit | None = None
    peer: Peer | None = None

    @property
    def found(self) -> int:
        """Tokens that are kept, before the planner shortened them."""
        return max(self.own.found, 0 if self.other is None else self.other.found)

    @property
    def tokens(self) -> int:
        """Tokens that a load gives."""
        return self.own.tokens if self.other is None else self.other.tokens

    def release(self) -> None:
        """Give the leases back without loading. Idempotent."""
        self.own.release()
        if self.other is not None:
            self.other.release()


@dataclass(frozen=True, eq=False)
class KinLoaded:
    """Verified blocks in order, all in the reader's dtype; valid until `close`.

    A peer's blocks say in their headers that they are kin, so that what is computed behind them inherits it.
    """

    blocks: tuple[Block, ...]
    lengths: tuple[int, ...]
    tokens_by_tier: Mapping[str, int]
    tokens_by_class: Mapping[str, int]
    held: tuple[Loaded, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def close(self) -> None:
        """End the leases. Idempotent."""
        for each in self.held:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def search(cache: BlockCache, query: Query, peers: Sequence[Peer], *, plan: bool = True) -> KinHit:
    """Look a query up for its own variant, then, where that leaves something missing, for each peer whose
    kinship the query's fidelity allows; the hit that reaches furthest."""
    own = cache.lookup(query, plan=plan)
    best = KinHit(own)
    full = own.tokens // query.chain.block_tokens
    allies = [peer for peer in peers if allowed(query.fidelity, peer)]
    if not allies or own.tokens > query.tokens - TAIL_TOKENS:
        return best
    # Asked first without a lookup: one that finds nothing would count as a miss of this request.
    near = cache.nearest(query.chain)
    tail = near is not None and near.common >= own.tokens + TAIL_TOKENS
    for peer in allies:
        other = replace(query, spec=peer.as_spec(query.spec))
        missing = cache.missing(other)
        if missing and missing[0] <= full and not tail:
            continue
        hit = cache.lookup(other, plan=plan)
        if hit.tokens > best.tokens:
            if best.other is not None:
                best.other.release()
            best = KinHit(own, hit, peer)
        else:
            hit.release()
    return best


def load(cache: BlockCache, hit: KinHit, *, timeout: float = 30.0) -> KinLoaded:
    """The blocks of a hit: the reader's own as far as they are whole, the peer's behind them."""
    own = cache.load(hit.own, timeout=timeout) if hit.own.tokens else None
    other = None if hit.other is None else cache.load(hit.other, timeout=timeout)
    held = tuple(each for each in (own, other) if each is not None)
    blocks = () if own is None else own.blocks
    lengths = () if own is None else own.lengths
    by_tier = Counter({} if own is None else own.tokens_by_tier)
    if other is not None and hit.peer is not None and other.tokens > sum(lengths):
        whole = sum(hit.own.query.chain.block_tokens == length for length in lengths)
        taken = _taken(other.blocks[whole:], hit.peer, hit.own.query)
        added = other.lengths[whole : whole + len(taken)]
        if sum(lengths[:whole]) + sum(added) > sum(lengths):
            blocks, lengths = (*blocks[:whole], *taken), (*lengths[:whole], *added)
            by_tier = _tiers(by_tier, other, sum(lengths), sum(lengths[:whole]))
    if not hit.own.tokens:
        hit.own.release()
    return KinLoaded(blocks, lengths, dict(+by_tier), _classes(blocks, lengths), held)


def allowed(fidelity: str, peer: Peer) -> bool:
    """Whether a request of this lowest fidelity takes a peer's KV."""
    if fidelity in KINSHIPS:
        return KINSHIPS.index(peer.kinship) <= KINSHIPS.index(fidelity)
    return fidelity in ("lossy", "fused")


def _taken(blocks: Sequence[Block], peer: Peer, query: Query) -> tuple[Block, ...]:
    """The peer's blocks as the reader's, up to the first that another version of its engine made."""
    taken = []
    for block in blocks:
        header = block.header
        if header.producer != peer.producer or header.fidelity not in ("exact", "kin"):
            break
        try:
            mine = converted(block, query.spec.dtype)
        except ForeignObject:
            break
        told = replace(mine.header, fidelity="kin", lineage=lineage_of(peer.kinship))
        taken.append(Block(told, mine.tokens, mine.arrays))
    return tuple(taken)


def _tiers(own: Mapping[str, int], other: Loaded, total: int, exact: int) -> Counter[str]:
    """Tokens by tier: the peer's tiers for what it gave, the own hit's for the rest."""
    found: Counter[str] = Counter()
    left = exact
    for tier, tokens in own.items():
        found[tier] += min(tokens, left)
        left -= min(tokens, left)
    left = total - exact
    for tier, tokens in other.tokens_by_tier.items():
        found[tier] += min(tokens, left)
        left -= min(tokens, left)
    return found


def _classes(blocks: Sequence[Block], lengths: Sequence[int]) -> dict[str, int]:
    """Tokens by the class that their blocks' headers tell."""
    found: Counter[str] = Counter()
    for block, length in zip(blocks, lengths, strict=True):
        header = block.header
        word = header.fidelity
        if word == "kin":
            word = next((each for each in KINSHIPS if lineage_of(each) == header.lineage), word)
        found[word] += length
    return dict(found)
