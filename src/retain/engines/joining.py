"""Joining: many requests for the same missing prefix wait for the first of them, which computes it."""

from __future__ import annotations

import time
from collections.abc import Callable

from retain.cache import BlockCache, Flight, Query
from retain.identity import Chain
from retain.model import ModelSpec

FLIGHT_SECONDS = 60.0
"""How long a request waits for another that computes the same prefix, where nothing predicts how long that
takes."""

LOOK_SECONDS = 0.25
"""How often a request that waits looks whether it was cancelled."""


def join_flight(
    cache: BlockCache, spec: ModelSpec, keys: Chain, cancelled: Callable[[], bool]
) -> Flight | None:
    """Lead the computation of the first missing block, or wait until whoever leads it has stored it.

    None where nothing is missing, or waiting is not worth it any more. What fails is counted, never raised.
    """
    deadline = None
    try:
        while not cancelled():
            missing = cache.missing(Query(keys, spec))
            if not missing:
                return None
            if deadline is None:
                # No longer than computing what is missing would take.
                first = missing[0] * keys.block_tokens
                expected = cache.planner.prefill_seconds(spec, first, int(keys.tokens.size) - first)
                wait = FLIGHT_SECONDS if expected is None else expected + LOOK_SECONDS
                deadline = time.monotonic() + wait
            left = max(0.0, deadline - time.monotonic())
            # Another variant's blocks would be of no use here: its flights are others.
            flight = cache.flight(keys.keys[missing[0]] + spec.variant, min(LOOK_SECONDS, left))
            if flight.leader:
                return flight
            if left == 0:
                return None
    except Exception as error:
        cache.failure("a flight could not be joined", f"{type(error).__name__}: {error}")
    return None
