"""Finding: which kept blocks serve a query, and which kept prompt comes nearest to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retain.errors import InvalidObject, StoreError
from retain.header import Frame, object_name
from retain.identity import TAIL_TOKENS, Chain, Tokens, block_key
from retain.model import ModelSpec, Slice

from .adopt import Adopter, read_head
from .ask import Asker
from .forms import together
from .ledger import Ledger
from .planner import Planner
from .results import Nearest, Part, Query, Source
from .tier import NONE, Slots, Tier

CONTINUATIONS = 16
"""How many kept blocks behind one parent are compared with a prompt, the latest first."""

HEADS = 4096
"""How many blocks' token ids are remembered, so that a growing conversation does not read headers again."""


@dataclass(frozen=True)
class Head:
    """What the head of an object tells a search: its key, form, token ids, and where media begin in it."""

    key: bytes
    form: int
    tokens: Tokens
    media: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """A query as far as the index needs it: digests. `root` is the parent of the first key.

    `rest` are the token ids (u32le) behind the last full block, where no media lie among them: shared tiers
    are asked for tails of them.
    """

    keys: tuple[bytes, ...]
    root: bytes
    block_tokens: int
    spec: ModelSpec
    wanted: Slice
    fidelity: str
    limit: int
    rest: bytes = b""

    @classmethod
    def of(cls, query: Query) -> Search:
        chain = query.chain
        return cls(
            chain.keys,
            chain.root,
            chain.block_tokens,
            query.spec,
            query.wanted,
            query.fidelity,
            query.tokens,
            rest_of(chain),
        )

    def parent(self, index: int) -> bytes:
        """The key before block `index`."""
        return self.keys[index - 1] if index else self.root

    def tails(self) -> list[tuple[bytes, Tokens]]:
        """The tails that may be kept of the prompt's end, the longest first: key and token ids."""
        first = len(self.keys) * self.block_tokens
        rest = np.frombuffer(self.rest, "<u4").astype(np.uint32, copy=False)
        if self.limit - first < TAIL_TOKENS:
            return []
        # Tails are kept in whole steps, but for those of prompts that were handed over to their last token.
        steps = range(rest.size - rest.size % TAIL_TOKENS, 0, -TAIL_TOKENS)
        lengths = dict.fromkeys((rest.size, *steps))
        parent = self.parent(len(self.keys))
        return [(block_key(parent, rest[:length]), rest[:length]) for length in lengths]


def rest_of(chain: Chain) -> bytes:
    """The token ids behind a chain's last full block, for `Search.rest`."""
    first = len(chain.keys) * chain.block_tokens
    if any(media.position + media.length > first for media in chain.media):
        return b""
    return chain.tokens[first:].astype("<u4", copy=False).tobytes()


@dataclass(frozen=True)
class Candidate:
    """A kept block that may agree with a prompt in its first tokens; `media` are where media begin in it, and
    `sources` hold what is wanted of it: one object, or slices that do together.
    """

    key: bytes
    tokens: Tokens
    media: tuple[int, ...]
    sources: tuple[Source, ...]


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
            best = Part(candidate.key, first, common, candidate.sources)
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
    """Answers from the tiers' indices, and from what the servers of shared tiers say; reads an object's head
    only to compare token ids.
    """

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger, planner: Planner) -> None:
        self._tiers = tuple(tiers)
        self._asker = Asker(tiers, ledger, planner)
        self._ledger = ledger
        self._heads: OrderedDict[tuple[str, str], Head] = OrderedDict()
        self._heads_lock = threading.Lock()
        self.adopter = Adopter(self._tiers[1:], ledger)

    # what serves a query

    def find(self, search: Search) -> Found:
        """What may serve a search, unleased: the longest run of full blocks, and what continues its last."""
        if search.limit < 1:
            return Found((), ())
        keys = search.keys[: -(-search.limit // search.block_tokens)]
        matches = self._match(keys, search)
        if self._look(matches, keys, search):
            matches = self._match(keys, search)
        tails = search.tails() if self._asker else []
        if self._asker and self._ask(matches, keys, tails, search):
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
            if len(parts) == len(search.keys):
                candidates += self._kept_tail(tails, search)
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
        """Whether memory keeps the raw block called `name` already. One that lies below alone was computed
        anew because loading it was not worth its time: it belongs in memory.
        """
        return self._tiers[0].equals(name)

    def _look(self, matches: Sequence[Slots], keys: Sequence[bytes], search: Search) -> bool:
        """Look up blocks in tiers that are not listed yet, up to the first that is missing; whether any was
        found. Nothing is looked for where all tiers are listed.
        """
        found = 0
        for tier in self._tiers[1:]:
            if tier.indexed.is_set():
                continue
            for index, key in enumerate(keys):
                if any(slots[index] != NONE for slots in matches):
                    continue
                names = [
                    object_name(key, search.spec.variant, part, tier.codec.name)
                    for part in dict.fromkeys((search.spec.whole, search.wanted))
                ]
                if not self.adopter.look(tier, names):
                    break
                found += 1
        return found > 0

    def _ask(
        self,
        matches: Sequence[Slots],
        keys: Sequence[bytes],
        tails: Sequence[tuple[bytes, Tokens]],
        search: Search,
    ) -> bool:
        """Ask the shared tiers for what no index knows; whether they have told of anything."""
        rows = [
            (key, search.parent(index))
            for index, key in enumerate(keys)
            if all(slots[index] == NONE for slots in matches) and not self._pieces(key, search)
        ]
        parent = search.parent(len(search.keys))
        for key, _ in tails:
            if any(tier.holds(key) for tier in self._tiers):
                break  # shorter ones are of no more use
            rows.append((key, parent))
        return bool(rows) and self._asker.ask(rows, search.spec, search.wanted, search.limit, search.fidelity)

    def _kept_tail(self, tails: Sequence[tuple[bytes, Tokens]], search: Search) -> tuple[Candidate, ...]:
        """The longest kept tail of the prompt's end that shared tiers have told of."""
        for key, tokens in tails:
            for number, tier in enumerate(self._tiers):
                if tier.shared is None:
                    continue
                slot = int(tier.match([key], search.spec, search.wanted, search.fidelity)[0])
                source = None if slot == NONE else self._source(number, slot)
                if source is not None:
                    return (Candidate(key, tokens, (), (source,)),)
        return ()

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
        split: dict[bytes, Head] = {}
        for number, tier in enumerate(self._tiers):
            accepted = set(tier.forms(search.spec, search.wanted, search.fidelity))
            for slot in tier.children(search.parent(index), CONTINUATIONS):
                head = self._head(tier, slot)
                if head is None or head.key in found:
                    continue
                if head.form not in accepted:
                    split.setdefault(head.key, head)
                    continue
                source = self._source(number, slot)
                if source is not None:
                    found[head.key] = Candidate(head.key, head.tokens, head.media, (source,))
        for key, head in split.items():
            sources = () if key in found else self._pieces(key, search)
            if sources:
                found[key] = Candidate(key, head.tokens, head.media, sources)
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
        keys = [part.key for part in parts]
        for tier in self._tiers:
            tier.touch(keys)

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
        if tier.shared is not None:
            return None  # a request is not kept waiting for it; tails are asked for by their keys
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
        try:
            return read_head(tier, name)
        except (InvalidObject, StoreError) as error:
            self._ledger.failure(
                f"the head of an object of the {tier.name} tier could not be read", f"{name}: {error}"
            )
            return None, None

    def close(self) -> None:
        self.adopter.close()
        self._asker.close()


def common_length(a: Tokens, b: Tokens) -> int:
    """How many first tokens two lists share."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
