"""Handing over: one engine computes a prompt, another goes on from there, and knows how much it will find.

An engine stores behind its answers, so the next one may look before all of it is there. What passes between
them is vLLM's `kv_transfer_params`: the first is asked with `do_remote_decode`, and answers how many of the
prompt's tokens are on their way into the tiers; the second is asked with that answer, and waits for them
briefly. What has not come by then is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from retain.cache import BlockCache, Planner, Query
from retain.identity import TAIL_TOKENS, Chain
from retain.model import ModelSpec

WAIT_SECONDS = 2.0
"""How long promised tokens are waited for where computing them is not predicted to take longer. An engine in
another process stores a prompt within milliseconds, on a machine without a free core within tenths."""

LOOK_SECONDS = 0.01
"""How often is looked for them."""


def asked(params: object) -> bool:
    """Whether a request's `kv_transfer_params` say that another engine will go on from its prompt."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def promise(tokens: int) -> dict[str, Any]:
    """The answer's `kv_transfer_params`: so many first tokens are in the tiers, or on their way there."""
    return {"do_remote_prefill": True, "retain": {"tokens": tokens}}


def promised(params: object) -> int:
    """How many first tokens of a request's prompt its `kv_transfer_params` promise; 0 where they say
    nothing of it.
    """
    own = params.get("retain") if isinstance(params, Mapping) else None
    tokens = own.get("tokens") if isinstance(own, Mapping) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 0


def findable(tokens: int) -> int:
    """How many of so many kept first tokens a lookup finds at least: a tail counts from 16 tokens on."""
    return tokens - tokens % TAIL_TOKENS


def wait(
    cache: BlockCache, spec: ModelSpec, chain: Chain, promised: int, cancelled: Callable[[], bool]
) -> None:
    """Wait until a prompt's promised tokens are kept, whatever variant computed them, but not for long.

    What fails is counted, never raised.
    """
    wanted = findable(min(promised, int(chain.tokens.size) - 1))
    until = time.monotonic() + patience(cache.planner, spec, promised)
    try:
        while not cancelled() and time.monotonic() < until:
            near = cache.nearest(chain)
            if near is not None and near.common >= wanted:
                return
            with cache.lookup(Query(chain, spec, limit=wanted), plan=False) as hit:  # asks shared tiers too
                if hit.found >= wanted:
                    return
            time.sleep(LOOK_SECONDS)
    except Exception as error:
        cache.failure("promised tokens could not be waited for", f"{type(error).__name__}: {error}")


def patience(planner: Planner, spec: ModelSpec, tokens: int) -> float:
    """How many seconds to wait for promised tokens."""
    return max(WAIT_SECONDS, planner.prefill_seconds(spec, 0, tokens) or 0.0)
