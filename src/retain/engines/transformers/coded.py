"""Coded KV under audit: how much it changed what the model says next, on the very request that used it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from retain.fidelity import QUALITIES
from retain.identity import Tokens, as_tokens

from .host import Host
from .layers import Rows, layers_of
from .session import Session

MOST_TOKENS = 256
"""Next tokens that are looked at, at the most: their logits are held in memory twice."""

Compute = Callable[[Tokens, DynamicCache, int], Tensor | None]
"""Runs tokens behind what a cache holds and gives the logits of the last so many; None when the model was
busy."""


@dataclass(frozen=True)
class Loss:
    """The summed KL, in nats, of so many next tokens on KV of a quality, beside those on computed KV."""

    quality: str
    kl: float
    tokens: int


def quality_used(session: Session) -> str | None:
    """The worst quality among what a request reused; None where something is not known here."""
    qualities = [part.quality for part in session.reused]
    return None if "" in qualities else max(qualities, key=QUALITIES.index, default="exact")


def loss_of(session: Session, host: Host, compute: Compute) -> Loss | None:
    """The loss of a request's reused KV: both runs of what came behind it, answer included.

    None when the model was busy too long, or rows that are needed have gone.
    """
    quality = quality_used(session)
    tokens = as_tokens(session.tokens[: session.start + MOST_TOKENS])
    behind = tokens[session.start :]
    served = _restored(session, host)
    if quality is None or served is None or not behind.size:
        return None
    fresh = host.empty_cache(int(tokens.size))
    if compute(tokens[: session.start], fresh, 1) is None:
        return None
    wanted = compute(behind, fresh, int(behind.size))
    found = compute(behind, served, int(behind.size))
    if wanted is None or found is None:
        return None
    a, b = torch.log_softmax(wanted.double(), -1), torch.log_softmax(found.double(), -1)
    kl = float((a.exp() * (a - b)).sum(-1).clamp(min=0).sum())
    # A NaN is no small loss.
    return Loss(quality, kl if kl == kl else float("inf"), int(behind.size))


def _restored(session: Session, host: Host) -> DynamicCache | None:
    """A cache with the rows that the request began with; None where a layer holds them no longer."""
    cache = host.empty_cache(len(session.tokens) - session.start)
    for layer, held in zip(layers_of(cache), session.rows, strict=True):
        origin = 0 if layer.window is None else max(0, session.start - layer.window + 1)
        if not held.origin <= origin <= session.start <= held.stop:
            return None
        rows = Rows(host.pool, held.k, held.v, origin, session.start - origin + MOST_TOKENS)
        rows.append(*held.view(origin, session.start))
        layer.start(rows)
    return cache
