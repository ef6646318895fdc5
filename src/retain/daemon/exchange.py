"""What a client and the daemon say to each other about lookups and loads, over one link."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from retain.block import Block, open_object
from retain.cache import Hit, Query
from retain.cache.find import Candidate, rest_of
from retain.cache.read import Want, shape
from retain.cache.results import Lease, Part, Source
from retain.header import layers_text
from retain.model import ModelSpec

from . import link as session
from . import messages, wire
from .link import Link

CHAINS = 32
"""How many chains a client builds upon; fewer than the daemon remembers."""

R = TypeVar("R", bound=messages.Reply)


def ask(link: Link, request: messages.Request, kind: type[R], timeout: float | None = None) -> R:
    """The reply to a request. Raises WireError where it is of another kind."""
    reply = link.call(request, session.CALL_SECONDS if timeout is None else timeout)
    if not isinstance(reply, kind):
        raise wire.WireError(_reason(reply))
    return reply


def tell(link: Link, message: messages.OneWay) -> None:
    """Send a message that has no reply."""
    with suppress(wire.WireError):  # a daemon that is gone has nothing left to be told
        link.call(message, session.CALL_SECONDS)


def model_number(link: Link, spec: ModelSpec) -> int:
    """The number under which the daemon knows a model in this session. Raises WireError."""
    number = link.models.get(spec)
    if number is None:
        with link.lock:
            link.numbers += 1
            number = link.numbers
        told = messages.ModelWire(
            spec.name,
            spec.architecture,
            layers_text(spec.layers),
            spec.dtype,
            spec.kin,
            spec.variant,
            spec.adapter,
        )
        ask(link, messages.Model(number, told), messages.Done)
        link.models[spec] = number
    return number


def look(link: Link, query: Query) -> messages.Found:
    """Look a query up, sending only the keys that are new. Raises WireError."""
    chain = query.chain
    keys = chain.keys[: -(-query.tokens // chain.block_tokens)]
    model = model_number(link, query.spec)
    base, keep = 0, 0
    with link.lock:
        link.numbers += 1
        number = link.numbers
        known = link.chains.get(keys[0]) if keys else None
    if known is not None:
        base, keep = known[0], _common(known[1], keys)
    while True:
        request = messages.Lookup(
            model, number, base, keep, b"".join(keys[keep:]), chain.root, chain.block_tokens,
            query.wanted.text,
            query.fidelity, query.tokens, rest_of(chain),
        )  # fmt: skip
        reply = link.call(request, session.CALL_SECONDS)
        if isinstance(reply, messages.Refused) and keep:
            base = keep = 0  # the daemon has forgotten the earlier chain
            continue
        if not isinstance(reply, messages.Found):
            raise wire.WireError(_reason(reply))
        if keys:
            with link.lock:
                link.chains[keys[0]] = (number, keys)
                link.chains.move_to_end(keys[0])
                while len(link.chains) > CHAINS:
                    link.chains.popitem(last=False)
        return reply


def parts_of(query: Query, reply: messages.Found, link: Link) -> tuple[Part, ...]:
    """The full blocks of a reply as parts of a hit. Raises ValueError for a reply that makes no sense."""
    size = query.chain.block_tokens
    if len(reply.parts) > len(query.chain.keys) + 1 or any(
        tier >= len(link.tiers) for tier, _ in reply.parts
    ):
        raise ValueError("the daemon found more than was asked for")
    return tuple(
        Part(
            query.chain.keys[index],
            index * size,
            min(size, query.tokens - index * size),
            (Source(tier, 0, query.wanted, length),),
        )
        for index, (tier, length) in enumerate(reply.parts)
    )


def load_blocks(link: Link, hit: Hit, timeout: float) -> tuple[list[Block], tuple[Lease, ...]]:
    """A hit's blocks as views of the mapped arena, with their lease. Raises WireError or InvalidObject."""
    model = model_number(link, hit.query.spec)
    owned = int(hit.query.chain.tokens.size) > 0  # a claimed hit's lease is its looker's
    link.hold()
    try:
        reply = link.call(messages.Load(hit.handle, model, timeout, owned), timeout + session.CALL_SECONDS)
        if owned:
            hit.lease.forget()
        if not isinstance(reply, messages.Blocks):
            raise wire.WireError(_reason(reply))
    except BaseException:
        link.let_go()
        raise
    lease = Lease(lambda: _give_back(link, messages.Release(reply.lease)))
    if not reply.blocks:
        lease.release()
        return [], ()
    want = Want(hit.query.spec, hit.query.fidelity)
    blocks: list[Block] = []
    bases: list[object] = []
    try:
        for part, places in zip(hit.parts, reply.blocks, strict=False):
            pieces = []
            for offset, size in places:
                frame, arrays = open_object(link.readable[offset : offset + size])
                want.check(frame.header, part.key)
                tokens = arrays.pop("tokens")
                bases.append(tokens.base)
                pieces.append(Block(frame.header, tokens, arrays))
            blocks.append(shape(pieces, hit.query.wanted))
    except BaseException:
        lease.release()
        raise
    _end_with_last(bases, lease)
    return blocks, (lease,)


def _give_back(link: Link, message: messages.OneWay) -> None:
    tell(link, message)
    link.let_go()


def place(link: Link, request: messages.Reserve) -> messages.Place:
    """A place in the arena, held over the link until the client lets go. Raises WireError."""
    link.hold()
    try:
        found = ask(link, request, messages.Place)
    except BaseException:
        link.let_go()
        raise
    if found.offset < 0:
        link.let_go()
    return found


def candidate_of(told: messages.Candidate, query: Query) -> Candidate:
    tokens = np.frombuffer(told.tokens, "<u4")
    source = Source(told.tier, 0, query.wanted, told.size)
    return Candidate(told.key, tokens, told.media, (source,))


def _common(known: Sequence[bytes], keys: Sequence[bytes]) -> int:
    """How many first keys two chains share: by bisection, since a key stands for all before it."""
    low, high = 0, min(len(known), len(keys))
    while low < high:
        middle = (low + high + 1) // 2
        if known[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _reason(reply: messages.Reply | None) -> str:
    return (
        reply.reason if isinstance(reply, messages.Refused) else f"the daemon answered {type(reply).__name__}"
    )


def _end_with_last(bases: Sequence[object], lease: Lease) -> None:
    """Have the lease end when the last of the arrays is gone, if nobody ends it before."""
    left = len(bases)
    lock = threading.RLock()  # garbage may be collected, and a base with it, while this thread holds it

    def gone() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            lease.release()

    for base in bases:
        weakref.finalize(base, gone)
