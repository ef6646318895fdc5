"""What bench dialogues says a trace allows is what a cache without bounds serves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.bench.dialogues import Turn, allowed
from retain.cache import Query, open_cache
from retain.identity import BLOCK_TOKENS, TAIL_TOKENS, chain, space_of
from tests.blocks import block_at, small_spec

SPEC = small_spec()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(2, 700), st.integers(1, 40)), min_size=1, max_size=6)
)
def test_the_ideal_is_what_the_cache_serves(spoken: list[tuple[int, int, int]]) -> None:
    # Prompts that agree in their first 300 tokens or all along, as turns of dialogues do.
    base = np.arange(3000, dtype=np.uint32)
    turns, answers, served = [], [], []
    with open_cache("memory:64MiB") as cache:
        for number, (who, size, said) in enumerate(spoken):
            prompt = np.concatenate([base[:300], base[300:] + 10_000 * who])[:size]
            answer = [50_000 + number] * said
            turns.append(Turn(who, prompt))
            answers.append(answer)
            asked = Query(chain(space_of(SPEC.kin), prompt), SPEC, limit=size - 1)
            with cache.lookup(asked, plan=False) as hit:
                served.append(hit.tokens)
            whole = chain(space_of(SPEC.kin), np.concatenate([prompt, np.asarray(answer[:-1], np.uint32)]))
            for index in range(len(whole.keys)):
                cache.store(block_at(SPEC, whole, index))
            tail = (whole.tokens.size - len(whole.keys) * BLOCK_TOKENS) // TAIL_TOKENS * TAIL_TOKENS
            if tail:
                cache.store(block_at(SPEC, whole, len(whole.keys), count=tail))
    assert allowed(turns, answers) == served
