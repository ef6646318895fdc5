"""Finding: which kept blocks serve a query, and which kept prompt comes nearest to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retain.errors import InvalidObject, StoreError
from retain.header import BlockHeader, Frame, parse_frame
from retain.identity import TAIL_TOKENS, Chain, Tokens
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

    def find(self, query: Query) -> tuple[Part, ...]:
        """The parts of the longest usable prefix, unleased. Everything found is touched, in chain order."""
        chain, limit = query.chain, query.tokens
        if limit < 1:
            return ()
        keys = chain.keys[: -(-limit // chain.block_tokens)]
        matches = [tier.match(keys, query.spec, query.wanted, query.fidelity) for tier in self._tiers]
        parts: list[Part] = []
        for index, key in enumerate(keys):
            first = index * chain.block_tokens
            sources = self._whole(matches, index, query) or self._pieces(key, query)
            if not sources:
                break
            parts.append(Part(key, first, min(chain.block_tokens, limit - first), sources))
        first = len(parts) * chain.block_tokens
        if first < limit:
            partial = self._continuation(query, len(parts), limit - first)
            if partial is not None:
                parts.append(partial)
        self._touch(matches, len(keys), parts)
        return tuple(parts)

    def missing(self, query: Query) -> list[int]:
        """The indices of full blocks that no tier can give."""
        keys = query.chain.keys
        matches = [tier.match(keys, query.spec, query.wanted, query.fidelity) for tier in self._tiers]
        return [
            index
            for index, key in enumerate(keys)
            if not self._whole(matches, index, query) and not self._pieces(key, query)
        ]

    def present(self, header: BlockHeader) -> bool:
        """Whether a block is kept already, in memory or below, in a form that equals it."""
        return any(tier.equals(header) for tier in self._tiers)

    def _whole(self, matches: Sequence[Slots], index: int, query: Query) -> tuple[Source, ...]:
        for number, slots in enumerate(matches):
            slot = int(slots[index])
            if slot != NONE:
                source = self._source(number, slot)
                if source is not None:
                    return (source,)
        return ()

    def _pieces(self, key: bytes, query: Query) -> tuple[Source, ...]:
        """Slices written with another split, where together they hold what is wanted."""
        found: dict[str, Source] = {}
        for number, tier in enumerate(self._tiers):
            for slot, form in tier.pieces(key, query.spec, query.fidelity):
                source = self._source(number, slot)
                if source is not None:
                    found.setdefault(form.slice.text, source)
        sources = tuple(found.values())
        return sources if sources and together([s.slice for s in sources], query.wanted) else ()

    def _source(self, number: int, slot: int) -> Source | None:
        tier = self._tiers[number]
        with tier.lock:
            try:
                record = tier.index.record(slot)
            except IndexError:
                return None
            return Source(number, slot, tier.form(slot).slice, record.size)

    def _continuation(self, query: Query, index: int, limit: int) -> Part | None:
        """The kept block behind the last full one that shares the most first tokens with the prompt."""
        parent = query.chain.parent(index)
        first = index * query.chain.block_tokens
        prompt = query.chain.tokens[first : first + limit]
        touched = [m for m in query.chain.media if m.position + m.length > first]
        best: tuple[int, Source, bytes] | None = None
        for number, tier in enumerate(self._tiers):
            accepted = set(tier.forms(query.spec, query.wanted, query.fidelity))
            for slot in tier.children(parent, CONTINUATIONS):
                head = self._head(tier, slot)
                if head is None or head.form not in accepted:
                    continue
                common = common_length(prompt, head.tokens)
                # Equal placeholder tokens say nothing about media: stop before the first one on either side.
                for position in [m.position - first for m in touched] + list(head.media):
                    common = min(common, max(position, 0))
                if common >= TAIL_TOKENS and (best is None or common > best[0]):
                    source = self._source(number, slot)
                    if source is not None:
                        best = (common, source, head.key)
        if best is None:
            return None
        return Part(best[2], first, best[0], (best[1],))

    def _touch(self, matches: Sequence[Slots], count: int, parts: Sequence[Part]) -> None:
        """A block in use is in use in every tier that holds it: else the copy below would age while memory
        serves.
        """
        for number, tier in enumerate(self._tiers):
            used: dict[int, None] = {}
            for index, part in enumerate(parts):
                if index < count and matches[number][index] != NONE:
                    used[int(matches[number][index])] = None
                used.update((source.slot, None) for source in part.sources if source.tier == number)
            with tier.lock:
                tier.touch(np.array([slot for slot in used if tier.live(slot)], np.uint32))

    # leases

    def acquire(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Lease the parts' objects; the parts up to the first that is gone meanwhile."""
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

    def release(self, parts: Iterable[Part]) -> None:
        """Give back what `acquire` took."""
        for part in parts:
            self._release_sources(part.sources)

    def _release_sources(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self._tiers[source.tier].release([source.slot])

    # the nearest kept prompt

    def nearest(self, chain: Chain) -> Nearest | None:
        """See Cache.nearest."""
        depth = 0
        for key in chain.keys:
            if not any(tier.holds(key) for tier in self._tiers):
                break
            depth += 1
        start = depth * chain.block_tokens
        prompt = chain.tokens[start:]
        best: tuple[int, Tokens] | None = None
        for tier in self._tiers:
            for slot in tier.children(chain.parent(depth), CONTINUATIONS):
                head = self._head(tier, slot)
                if head is None:
                    continue
                common = common_length(prompt, head.tokens)
                if best is None or common > best[0]:
                    best = (common, head.tokens[common:])
        if best is not None:
            return Nearest(start + best[0], best[1])
        return Nearest(start, np.empty(0, np.uint32)) if depth else None

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
