"""With Retain vLLM says what it says without: at every length around the borders of blocks and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Answer, Engine, prompt, same

LENGTHS = (17, 255, 256, 257, 271, 272, 273, 383, 384, 385, 511, 512, 513, 527, 528, 529, 700)
GENERATED = 6
CHUNK = 192
"""Tokens a step: long prompts are computed in several, whose borders are none of blocks."""


@pytest.fixture(scope="module")
def plain(engines: Callable[..., Engine], tiny_llama: Path) -> dict[int, Answer]:
    """The answers without a connector."""
    engine = engines(tiny_llama, None, max_num_batched_tokens=CHUNK, max_num_seqs=16)
    answers = {length: engine.ask(prompt(length, length), tokens=GENERATED)[0] for length in LENGTHS}
    engine.close()
    return answers


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine], tiny_llama: Path, plain: dict[int, Answer]) -> Engine:
    return engines(tiny_llama, {"tiers": ["memory:256MiB"]}, max_num_batched_tokens=CHUNK, max_num_seqs=16)


def usable(length: int) -> int:
    """What a prompt's second coming need not compute: its full blocks, and 16 tokens or more of what follows.

    Kept are all tokens with KV, the answer's too, the tail cut to a multiple of 16. The last one
    is computed anyway.
    """
    blocks = length // 256 * 256
    kept = min(length - 1, (length + GENERATED - 1) // 16 * 16)
    return kept if kept - blocks >= 16 else min(length - 1, blocks)


def test_a10_a11_a24_a_prompt_of_any_length_is_found_whole_the_second_time_and_answered_alike(
    engine: Engine, plain: dict[int, Answer]
) -> None:
    for length in LENGTHS:
        first = engine.ask(prompt(length, length), tokens=GENERATED)[0]
        second = engine.ask(prompt(length, length), tokens=GENERATED)[0]
        third = engine.ask(prompt(length, length), tokens=GENERATED)[0]
        assert first.cached == 0
        assert second.cached == third.cached == usable(length), length
        for answer in (first, second, third):
            assert same(answer, plain[length]), length
    assert not engine.cache.stats().failures


def test_a_prefix_of_what_was_kept_is_used_up_to_the_first_token_that_differs(engine: Engine) -> None:
    whole = prompt(600, 600)
    engine.ask(whole, tokens=1)
    for common in (16, 255, 256, 300, 592):
        changed = [*whole[:common], *prompt(50, 1)]
        fresh = [3, *changed[1:]]  # nothing of this one is kept
        answer = engine.ask(changed)[0]
        assert answer.cached == common
        engine.cache.clear()
        assert same(answer, engine.ask(changed)[0])
        assert engine.ask(fresh)[0].cached == 0
        engine.cache.clear()
        engine.ask(whole, tokens=1)


def test_a20_a_salt_keeps_prompts_apart(engine: Engine) -> None:
    text = prompt(400, 20)
    engine.ask(text, cache_salt="one")
    assert engine.ask(text, cache_salt="two")[0].cached == 0
    assert engine.ask(text)[0].cached == 0
    assert engine.ask(text, cache_salt="one")[0].cached == 399


def test_prompt_logprobs_are_computed_and_not_skipped(engine: Engine) -> None:
    text = prompt(400, 21)
    first = engine.ask(text)[0]
    again = engine.ask(text, prompt_logprobs=1)[0]
    assert again.cached == 0
    assert same(again, first)
    assert engine.ask(text)[0].cached == 399


def test_a4_generated_tokens_are_stored_once_a_block_and_one_tail(engine: Engine) -> None:
    before = engine.cache.stats().counters["stored_blocks"]
    answer = engine.ask(prompt(230, 22), tokens=100)[0]
    assert engine.cache.stats().counters["stored_blocks"] - before == 2  # 256 tokens, and 329 - 256 cut to 64
    whole = [*prompt(230, 22), *answer.tokens]
    assert engine.ask([*whole, 7])[0].cached == 320


def test_a12_a14_counters_tell_what_happened(engine: Engine) -> None:
    counters = engine.cache.stats().counters
    before = dict(counters)
    engine.ask(prompt(300, 23))
    engine.ask(prompt(300, 23))
    after = engine.cache.stats().counters
    assert after["lookups"] - before["lookups"] == 2
    assert after["lookup_hits"] - before["lookup_hits"] == 1
    assert after["hit_tokens"] - before["hit_tokens"] == 299
    assert after["requested_tokens"] - before["requested_tokens"] == 598
    assert after["loaded_tokens"] - before["loaded_tokens"] == 299


def test_a6_nothing_stays_leased_or_held_once_the_engine_is_idle(engine: Engine) -> None:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert engine.cache.stats().tiers["memory"].leased == 0
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a30_resetting_vllms_cache_with_the_connector_empties_every_tier(engine: Engine) -> None:
    engine.ask(prompt(300, 24))
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.cache.stats().tiers["memory"].objects == 0
    assert engine.ask(prompt(300, 24))[0].cached == 0
