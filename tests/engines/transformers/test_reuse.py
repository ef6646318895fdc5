"""Kept KV in place of a prefill: the same text and logits, in every geometry and at every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.cache import Cache
from retain.engines.transformers import Engine, Sampling, attach
from tests.engines.transformers.tiny import MODELS, llama, logits_of, prompt, text_of

pytestmark = pytest.mark.engine

Open = Callable[..., Cache]

NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
LENGTHS = [256 + d for d in (-17, -16, -15, -1, 0, 1, 15, 16, 17)] + [512 + d for d in (-1, 0, 1, 17)]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.fixture
def engine(model: Any, cache: Cache) -> Iterator[Engine]:
    with attach(model, None, cache) as attached:
        yield attached


def answer(engine: Engine, tokens: list[int], count: int = 6, **more: Any) -> tuple[list[int], Any]:
    """The greedy answer, and the report, once everything is stored."""
    generation = engine.stream(tokens, Sampling(max_tokens=count), **more)
    text = [step.token for step in generation]
    assert engine.settle()
    return text, generation.report


def usable(tokens: int) -> int:
    """What is reused of a shared beginning: full blocks, and of the next one at least 16 tokens or none."""
    return tokens if tokens % 256 >= 16 else tokens // 256 * 256


def same(model: Any, found: torch.Tensor, tokens: list[int]) -> bool:
    return float((found.float() - logits_of(model, tokens)).abs().max()) < NEAR[model.dtype]


def test_a33_logits_equal_a_recomputation_around_every_boundary_in_any_geometry(
    model: Any, engine: Engine
) -> None:
    for seed, length in enumerate(LENGTHS):
        tokens = prompt(length, seed)
        cold = engine.forward(torch.tensor([tokens]))
        assert cold.report.reused_tokens == 0
        assert same(model, cold.logits[0, -1], tokens)
        assert engine.settle()
        warm = engine.forward(torch.tensor([tokens]))
        assert warm.report.reused_tokens == usable(min(length - 1, length // 16 * 16))
        assert warm.report.computed == length - warm.report.reused_tokens
        assert same(model, warm.logits[0, -1], tokens)


def test_text_equals_the_plain_models_with_and_without_kept_kv(model: Any, engine: Engine) -> None:
    for seed, length in enumerate((40, 257, 530)):
        tokens = prompt(length, seed + 50)
        expected = text_of(model, tokens, 16)
        assert answer(engine, tokens, 16)[0] == expected
        text, report = answer(engine, tokens, 16)
        assert text == expected
        assert report.reused_tokens > 0
        generated = engine.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False)
        assert generated[0].tolist() == tokens + expected
        assert engine.last_report.reused_tokens == report.reused_tokens


def test_a_restored_cache_is_what_a_prefill_leaves(model: Any, engine: Engine) -> None:
    tokens = prompt(400)
    engine.forward(torch.tensor([tokens]))
    assert engine.settle()
    warm = engine.forward(torch.tensor([tokens]))
    assert warm.report.reused_tokens > 0
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=True).cache
    for mine, native in zip(warm.output.cache.layers, plain.layers, strict=True):
        assert mine.get_seq_length() == native.get_seq_length() == 400
        assert mine.keys.shape == native.keys.shape
        assert torch.allclose(mine.keys.float(), native.keys.float(), atol=NEAR[model.dtype])
        assert torch.allclose(mine.values.float(), native.values.float(), atol=NEAR[model.dtype])


def test_a_longer_prompt_uses_all_of_a_shorter_one(model: Any, engine: Engine) -> None:
    answer(engine, prompt(300), 1)
    longer = prompt(700)
    text, report = answer(engine, longer)
    assert report.reused_tokens == 288
    assert text == text_of(model, longer, 6)


def test_a_prompt_that_differs_inside_a_block_uses_the_part_before_it(model: Any, engine: Engine) -> None:
    first = prompt(600)
    answer(engine, first, 1)
    for common in (5, 250, 256, 300, 511):
        other = first[:common] + [(token + 1) % 200 + 2 for token in first[common:]]
        text, report = answer(engine, other)
        assert report.reused_tokens == usable(common)
        assert text == text_of(model, other, 6)


def test_a_conversation_of_several_turns_computes_only_what_is_new(model: Any, engine: Engine) -> None:
    tokens, kept = prompt(200), 0
    for turn in range(3):
        text, report = answer(engine, tokens, 24)
        # KV of an answer is computed token by token: in bfloat16 that may turn a close decision.
        if model.dtype == torch.float32:
            assert text == text_of(model, tokens, 24)
        else:
            assert same(model, engine.forward(torch.tensor([tokens])).logits[0, -1], tokens)
        assert report.reused_tokens >= kept
        kept = (len(tokens) + 23) // 16 * 16
        tokens = tokens + text + prompt(50, 100 + turn)


@pytest.mark.parametrize("length", [512, 513])
def test_a10_a24_the_same_prompt_hits_every_time_and_its_last_token_is_computed(
    model: Any, engine: Engine, length: int
) -> None:
    tokens = prompt(length, 3)
    first, _ = answer(engine, tokens)
    for _ in range(5):
        text, report = answer(engine, tokens)
        assert text == first
        assert report.reused_tokens == (511 if length == 512 else 512)
        assert report.computed == 1


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a34_prompts_of_a_few_tokens_are_answered(model: Any, engine: Engine, length: int) -> None:
    tokens = prompt(length)
    for _ in range(2):
        text, report = answer(engine, tokens)
        assert text == text_of(model, tokens, 6)
        assert report.reused_tokens < length
    assert torch.isfinite(engine.forward(torch.tensor([tokens])).logits).all()


def test_a25_after_a_restart_the_next_request_reuses_what_lies_on_disk(
    model: Any, opened: Open, tmp_path: Path
) -> None:
    tokens = prompt(600)
    with (
        opened("memory:64MiB", f"disk:{tmp_path}?capacity=1GiB") as cache,
        attach(model, None, cache) as engine,
    ):
        expected, _ = answer(engine, tokens)
    with (
        opened("memory:64MiB", f"disk:{tmp_path}?capacity=1GiB") as cache,
        attach(model, None, cache) as engine,
    ):
        text, report = answer(engine, tokens)
        assert report.reused == {"disk": 592}
        assert text == expected
        again, report = answer(engine, tokens)
        assert report.reused == {"memory": 592}
        assert again == expected


def test_damaged_objects_on_disk_are_computed_again_and_the_text_stays_right(
    opened: Open, tmp_path: Path
) -> None:
    model, tokens = llama(), prompt(1000)
    address = f"disk:{tmp_path}?capacity=1GiB"
    with opened("memory:64MiB", address) as cache, attach(model, None, cache) as engine:
        expected, _ = answer(engine, tokens)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(files) == 4
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-5000 + number] ^= 0x10
        path.write_bytes(data if number % 2 else data[:-100])
    with opened("memory:64MiB", address) as cache, attach(model, None, cache) as engine:
        text, report = answer(engine, tokens)
        assert text == expected
        assert report.reused_tokens == 0
        assert sum(cache.stats().failures.values()) > 0
        answer(engine, tokens)  # meets the damaged tail, which lay behind the first damaged block
        text, report = answer(engine, tokens)
        assert text == expected
        assert report.reused_tokens == 992


def test_a_cache_closed_between_requests_and_in_the_middle_of_one_ends_no_answer(cache: Cache) -> None:
    model, tokens = llama(), prompt(600)
    with attach(model, None, cache) as engine:
        expected = text_of(model, tokens, 300)
        generation = engine.stream(tokens, Sampling(max_tokens=300))
        text = [next(generation).token]
        cache.close()
        text += [step.token for step in generation]
        assert text == expected
        assert answer(engine, tokens, 300)[0] == expected


def test_a_cache_that_raises_is_a_miss(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("the cable is out")

    model, tokens = llama(), prompt(600)
    with attach(model, None, cache) as engine:
        expected, _ = answer(engine, tokens)
        for call in ("load", "lookup", "missing", "flight", "reserve"):
            monkeypatch.setattr(cache, call, broken)
            text, report = answer(engine, tokens)
            assert text == expected
            if call in ("load", "lookup"):
                assert report.reused_tokens == 0
        assert sum(cache.stats().failures.values()) >= 3
