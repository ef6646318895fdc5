"""Finding: which kept blocks serve a query, and which kept prompt comes nearest to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retain.errors import InvalidObject, StoreError
from retain.header import Frame, parse_frame
from retain.identity import TAIL_TOKENS, Chain, Tokens
from retain.model import ModelSpec, Slice
from retain.stores.base import StoredObject

from .ledger import Ledger
from .results import Nearest, Part, Query, Source
from .tier import NONE, Slots, Tier, together
from .workers import Workers

CONTINUATIONS = 16
"""How many kept blocks behind one parent are compared with a prompt, the latest first."""

HEAD_BYTES = 16 << 10
"""How much of an object is read to learn its header and token ids."""

HEADS = 4096
"""How many blocks' token ids are remembered, so that a growing conversation does not read headers again."""

ADOPT_SECONDS = 1.0
"""How long opening a cache waits for the headers of what it found; the rest is read in the background."""


@dataclass(frozen=True)
class Head:
    """What the head of an object tells a search: its key, form, token ids, and where media begin in it."""

    key: bytes
    form: int
    tokens: Tokens
    media: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """A query as far as the index needs it: digests, no tokens. `root` is the parent of the first key."""

    keys: tuple[bytes, ...]
    root: bytes
    block_tokens: int
    spec: ModelSpec
    wanted: Slice
    fidelity: str
    limit: int

    @classmethod
    def of(cls, query: Query) -> Search:
        chain = query.chain
        return cls(
            chain.keys, chain.root, chain.block_tokens, query.spec, query.wanted, query.fidelity, query.tokens
        )

    def parent(self, index: int) -> bytes:
        """The key before block `index`."""
        return self.keys[index - 1] if index else self.root


@dataclass(frozen=True)
class Candidate:
    """A kept block that may agree with a prompt in its first tokens; `media` are where media begin in it."""

    key: bytes
    tokens: Tokens
    media: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Found:
    """The full blocks that serve a search, in order, and the candidates behind the last of them."""

    parts: tuple[Part, ...]
    candidates: tuple[Candidate, ...]


def continuation(query: Query, found: Found) -> Part | None:
    """The candidate that shares most first tokens with the query's prompt, as a part; None below a tail."""
    chain = query.chain
    first = len(found.parts) * chain.block_tokens
    prompt = chain.tokens[first : query.tokens]
    starts = [media.position - first for media in chain.media if media.position + media.length > first]
    best: Part | None = None
    for candidate in found.candidates:
        common = common_length(prompt, candidate.tokens)
        # Equal placeholder tokens say nothing about media: stop before the first one on either side.
        common = min([common, *(max(start, 0) for start in (*starts, *candidate.media))])
        if common >= TAIL_TOKENS and (best is None or common > best.tokens):
            best = Part(candidate.key, first, common, (candidate.source,))
    return best


def nearest(chain: Chain, depth: int, continuations: Sequence[Tokens]) -> Nearest | None:
    """The kept prompt that agrees longest with a chain of which `depth` blocks are kept; None if none is."""
    start = depth * chain.block_tokens
    prompt = chain.tokens[start:]
    best = max(continuations, key=lambda tokens: common_length(prompt, tokens), default=None)
    if best is None:
        return Nearest(start, np.empty(0, np.uint32)) if depth else None
    common = common_length(prompt, best)
    return Nearest(start + common, best[common:])


class Finder:
    """Answers from the tiers' indices; reads an object's head only to compare token ids."""

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger) -> None:
        self._tiers = tuple(tiers)
        self._ledger = ledger
        self._heads: OrderedDict[tuple[str, str], Head] = OrderedDict()
        self._heads_lock = threading.Lock()
        self._workers = Workers("retain-adopt", 1)
        self._closed = threading.Event()
        self._adopted: dict[str, threading.Event] = {}
        for tier in self._tiers[1:]:
            self._adopt(tier)

    # what serves a query

    def find(self, search: Search) -> Found:
        """What may serve a search, unleased: the longest run of full blocks, and what continues its last."""
        if search.limit < 1:
            return Found((), ())
        keys = search.keys[: -(-search.limit // search.block_tokens)]
        matches = self._match(keys, search)
        parts: list[Part] = []
        for index, key in enumerate(keys):
            sources = self._whole(matches, index) or self._pieces(key, search)
            if not sources:
                break
            first = index * search.block_tokens
            parts.append(Part(key, first, min(search.block_tokens, search.limit - first), sources))
        candidates: tuple[Candidate, ...] = ()
        if len(parts) * search.block_tokens < search.limit:
            candidates = self._continuations(search, len(parts))
        return Found(tuple(parts), candidates)

    def missing(self, search: Search) -> list[int]:
        """The indices of full blocks that no tier can give."""
        matches = self._match(search.keys, search)
        return [
            index
            for index, key in enumerate(search.keys)
            if not self._whole(matches, index) and not self._pieces(key, search)
        ]

    def present(self, name: str) -> bool:
        """Whether the raw block called `name` is kept already, in memory or below, under whatever exact
        codec.
        """
        return any(tier.equals(name) for tier in self._tiers)

    def _match(self, keys: Sequence[bytes], search: Search) -> list[Slots]:
        return [tier.match(keys, search.spec, search.wanted, search.fidelity) for tier in self._tiers]

    def _whole(self, matches: Sequence[Slots], index: int) -> tuple[Source, ...]:
        for number, slots in enumerate(matches):
            slot = int(slots[index])
            if slot != NONE:
                source = self._source(number, slot)
                if source is not None:
                    return (source,)
        return ()

    def _pieces(self, key: bytes, search: Search) -> tuple[Source, ...]:
        """Slices written with another split, where together they hold what is wanted."""
        found: dict[str, Source] = {}
        for number, tier in enumerate(self._tiers):
            for slot, form in tier.pieces(key, search.spec, search.fidelity):
                source = self._source(number, slot)
                if source is not None:
                    found.setdefault(form.slice.text, source)
        sources = tuple(found.values())
        return sources if sources and together([s.slice for s in sources], search.wanted) else ()

    def _source(self, number: int, slot: int) -> Source | None:
        tier = self._tiers[number]
        with tier.lock:
            try:
                record = tier.index.record(slot)
            except IndexError:
                return None
            return Source(number, slot, tier.form(slot).slice, record.size)

    def _continuations(self, search: Search, index: int) -> tuple[Candidate, ...]:
        """Kept blocks behind the last full one that may share their first tokens with the prompt."""
        found: dict[bytes, Candidate] = {}
        for number, tier in enumerate(self._tiers):
            accepted = set(tier.forms(search.spec, search.wanted, search.fidelity))
            for slot in tier.children(search.parent(index), CONTINUATIONS):
                head = self._head(tier, slot)
                if head is None or head.form not in accepted or head.key in found:
                    continue
                source = self._source(number, slot)
                if source is not None:
                    found[head.key] = Candidate(head.key, head.tokens, head.media, source)
        return tuple(found.values())

    # leases

    def acquire(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Lease the parts' objects and record the use in chain order; those up to the first that is gone."""
        taken = self.hold(parts)
        self.touch(taken)
        return taken

    def hold(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Lease the parts' objects, up to the first that is gone, without recording a use."""
        taken: list[Part] = []
        for part in parts:
            held: list[Source] = []
            for source in part.sources:
                tier = self._tiers[source.tier]
                if not tier.acquire(source.slot, part.key):
                    break
                held.append(source)
            if len(held) < len(part.sources):
                self._release_sources(held)
                break
            taken.append(part)
        return tuple(taken)

    def touch(self, parts: Sequence[Part]) -> None:
        """Record a use, in all tiers: else the copy below would age while memory serves."""
        for tier in self._tiers:
            tier.touch(part.key for part in parts)

    def release(self, parts: Iterable[Part]) -> None:
        """Give back what `acquire` took."""
        for part in parts:
            self._release_sources(part.sources)

    def _release_sources(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self._tiers[source.tier].release([source.slot])

    # the nearest kept prompt

    def kept_path(self, keys: Sequence[bytes], root: bytes) -> tuple[int, list[Tokens]]:
        """How many leading keys are kept, under any form, and the token ids of what lies behind the last."""
        depth = 0
        for key in keys:
            if not any(tier.holds(key) for tier in self._tiers):
                break
            depth += 1
        parent = keys[depth - 1] if depth else root
        heads = (
            self._head(tier, slot) for tier in self._tiers for slot in tier.children(parent, CONTINUATIONS)
        )
        return depth, [head.tokens for head in heads if head is not None]

    def _head(self, tier: Tier, slot: int) -> Head | None:
        with tier.lock:
            try:
                record = tier.index.record(slot)
                name = tier.object_name(slot)
            except IndexError:
                return None
        with self._heads_lock:
            known = self._heads.get((tier.name, name))
            if known is not None:
                self._heads.move_to_end((tier.name, name))
                return known
        frame, tokens = self._read_head(tier, name)
        if frame is None or tokens is None:
            return None
        head = Head(record.key, record.form, tokens, tuple(m.position for m in frame.header.media))
        with self._heads_lock:
            self._heads[tier.name, name] = head
            while len(self._heads) > HEADS:
                self._heads.popitem(last=False)
        return head

    def _read_head(self, tier: Tier, name: str) -> tuple[Frame | None, Tokens | None]:
        buffer = bytearray(HEAD_BYTES)
        try:
            got = tier.store.read_into(name, memoryview(buffer))
            if got == 0:
                return None, None
            frame = parse_frame(memoryview(buffer)[:got])
            first = frame.tensors[0]
            stop = frame.data_start + first.size
            if first.name != "tokens" or first.shape != (frame.header.count,):
                raise InvalidObject("the object does not begin with its token ids")
            if stop > got:
                buffer = bytearray(stop)
                if tier.store.read_into(name, memoryview(buffer)) < stop:
                    raise InvalidObject("the object ends inside its token ids")
            return frame, np.frombuffer(bytes(buffer[frame.data_start : stop]), "<u4")
        except (InvalidObject, StoreError) as error:
            self._ledger.failure(
                f"the head of an object of the {tier.name} tier could not be read", f"{name}: {error}"
            )
            return None, None

    # what earlier runs left

    def _adopt(self, tier: Tier) -> None:
        done = threading.Event()
        self._adopted[tier.name] = done
        try:
            found = sorted(tier.store.scan(), key=lambda each: each.modified)
        except StoreError as error:
            self._ledger.failure(f"the {tier.name} tier could not be scanned", error)
            done.set()
            return
        adopted: list[StoredObject] = []
        for each in found:
            try:
                tier.adopt(each)
                adopted.append(each)
            except (ValueError, KeyError) as error:
                self._ledger.failure(
                    f"a foreign object lies in the {tier.name} tier and is left alone", error
                )
        self._ledger.count("adopted_objects", len(adopted))
        if not tier.make_room(0):
            self._ledger.failure(f"the {tier.name} tier holds more than its capacity", f"{tier.used} bytes")
        else:
            tier.release_room(0)
        self._workers.submit(lambda: self._learn(tier, adopted, done))
        done.wait(ADOPT_SECONDS)

    def _learn(self, tier: Tier, adopted: Sequence[StoredObject], done: threading.Event) -> None:
        try:
            # The latest first: they are the likeliest to be asked for.
            for each in reversed(adopted):
                if self._closed.is_set():
                    return
                slot = tier.find(each.name)
                if slot is None:
                    continue
                frame, _ = self._read_head(tier, each.name)
                if frame is None or frame.header.name != each.name or frame.size != each.size:
                    self._ledger.failure(f"a damaged object was removed from the {tier.name} tier", each.name)
                    tier.remove(slot)
                else:
                    tier.learn(each.name, frame.header)
        except Exception as error:
            self._ledger.failure(f"reading the headers of the {tier.name} tier failed", error)
        finally:
            done.set()

    def wait_adopted(self, tier: Tier, timeout: float = 60.0) -> None:
        """Wait until the headers of a tier's earlier objects are known, or it takes too long."""
        event = self._adopted.get(tier.name)
        if event is not None:
            event.wait(timeout)

    def close(self) -> None:
        self._closed.set()
        self._workers.stop()


def common_length(a: Tokens, b: Tokens) -> int:
    """How many first tokens two lists share."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
