"""With Retain vLLM says what it says without: at every length around the borders of blocks and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.cache import Query
from tests.blocks import block_at, chain_of, small_spec

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
    _PROMPT_LOGPROBS[:] = prompt_logprobs(engine, prompt(400, 21))
    engine.close()
    return answers


_PROMPT_LOGPROBS: list[float] = []
"""Those of a prompt, without a connector."""


def prompt_logprobs(engine: Engine, text: list[int]) -> list[float]:
    """The log probability of each of a prompt's tokens but the first."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    (output,) = engine.llm.generate([{"prompt_token_ids": text}], parameters, use_tqdm=False)
    engine.settle()
    assert not output.num_cached_tokens
    told: list[Any] = list(output.prompt_logprobs or [])
    return [each[token].logprob for each, token in zip(told[1:], text[1:], strict=True)]


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
    assert engine.ask(text)[0].cached == 399
    told = prompt_logprobs(engine, text)
    assert len(told) == 399
    assert told == pytest.approx(_PROMPT_LOGPROBS, abs=2e-3)
    again = engine.ask(text, prompt_logprobs=1)[0]
    assert again.cached == 0
    assert same(again, first)
    assert engine.ask(text)[0].cached == 399


def test_a27_a_turn_that_renders_the_last_answer_otherwise_is_used_up_to_the_first_difference(
    engine: Engine,
) -> None:
    text = prompt(280, 27)
    said = list(engine.ask(text, tokens=100)[0].tokens)
    for at in (0, 7, 50, 90):
        other = said[at] % 500 + 3
        turn = [*text, *said[:at], other, *said[at + 1 :], *prompt(30, 28)]
        answer = engine.ask(turn)[0]
        assert answer.cached == min(len(text) + at, 368)  # 379 had KV, the last part of a tail is not kept
        engine.cache.clear()
        assert same(answer, engine.ask(turn)[0])
        engine.cache.clear()
        assert list(engine.ask(text, tokens=100)[0].tokens) == said


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


def test_a30_resetting_vllms_cache_with_the_connector_empties_every_tier_of_this_model_alone(
    engine: Engine,
) -> None:
    foreign = block_at(small_spec(), chain_of(range(16)))
    engine.cache.clear()
    assert engine.cache.store(foreign).kept
    engine.ask(prompt(300, 24))
    assert engine.cache.stats().tiers["memory"].objects == 3
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.cache.stats().tiers["memory"].objects == 1
    assert engine.ask(prompt(300, 24))[0].cached == 0
    assert engine.cache.lookup(Query(chain_of(range(16)), small_spec())).tokens == 16


def test_each_token_is_copied_once_between_pages_and_arena_and_nowhere_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By accounting: what the copies move is what was kept and loaded, and their arrays lie in the arena."""
    store = engine.cache.tiers[0].store
    arena = np.frombuffer(store._memory, np.uint8)
    begin = arena.__array_interface__["data"][0]
    moved = {"gather": 0, "scatter": 0}
    paged = engine.worker._paged
    token_bytes = engine.connector._scheduler._spec.token_bytes

    def counted(name: str, copy: Any) -> Any:
        def wrapper(arrays: Any, tables: Any, position: int, start: int, count: int) -> None:
            for array in arrays.values():
                at = array.__array_interface__["data"][0]
                assert begin <= at
                assert at + array.nbytes <= begin + arena.nbytes
                moved[name] += array.nbytes // array.shape[2] * count
            copy(arrays, tables, position, start, count)

        return wrapper

    for name in moved:
        monkeypatch.setattr(paged, name, counted(name, getattr(paged, name)))
    texts = [prompt(1300, 60 + i) for i in range(12)]
    engine.ask(texts[0])
    engine.ask(texts[0])
    moved.update(gather=0, scatter=0)
    before, resident = engine.cache.stats().counters, own_bytes()
    for text in texts[1:]:
        engine.ask(text, tokens=1)
    for text in texts[1:]:
        assert engine.ask(text, tokens=1)[0].cached == 1296
    after = engine.cache.stats().counters
    assert moved["gather"] == 11 * 1296 * token_bytes
    assert moved["scatter"] == 11 * 1296 * token_bytes
    assert after["loaded_tokens"] - before["loaded_tokens"] == 11 * 1296
    headers = 11 * 6 * (16 << 10)
    assert moved["gather"] <= after["stored_bytes"] - before["stored_bytes"] <= moved["gather"] + headers
    assert own_bytes() - resident < moved["gather"] // 4


def own_bytes() -> int:
    """The memory that belongs to this process alone: the arena is shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
