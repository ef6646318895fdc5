"""Preemption, aborts, failed loads, late copies: vLLM's answers are those without Retain."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import Answer, Engine, prompt, same

POOL = 20
"""Blocks of 128 tokens: far fewer than the prompts below need together."""

EDGES = (127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513, 600)
"""Lengths around the borders of vLLM's blocks and of Retain's."""

OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": POOL,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "max_model_len": 1024,
}


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of which half share their first 300 tokens, of lengths around block borders."""
    source = random.Random(seed)
    shared = prompt(300, seed)
    lengths = [source.choice((200, 255, 256, 257, 400, 512, 513, 600)) for _ in range(count)]
    return [
        ([*shared, *prompt(length, seed + i)] if i % 2 else prompt(length, seed + i))[:length]
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def plain(engines: Callable[..., Engine], tiny_llama: Path) -> dict[str, list[Answer]]:
    """The answers without a connector."""
    engine = engines(tiny_llama, None, **OPTIONS)
    found = {
        "many": [engine.ask(each, tokens=24)[0] for each in prompts(16, 1)],
        "long": [engine.ask(each, tokens=120)[0] for each in prompts(8, 2)],
        "one": engine.ask(prompt(600, 3)),
        "edges": [engine.ask(prompt(length, 7))[0] for length in EDGES],
    }
    engine.close()
    return found


@pytest.fixture(scope="module", params=["own", "apc"])
def engine(
    request: pytest.FixtureRequest,
    engines: Callable[..., Engine],
    tiny_llama: Path,
    plain: dict[str, list[Answer]],
) -> Iterator[Engine]:
    """With vLLM's own prefix cache off, and on."""
    engine = engines(
        tiny_llama, {"tiers": ["memory:256MiB"]}, enable_prefix_caching=request.param == "apc", **OPTIONS
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def clean(engine: Engine) -> Iterator[None]:
    engine.llm.reset_prefix_cache(reset_connector=True)
    yield
    engine.settle()
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
    assert engine.cache.stats().tiers["memory"].leased == 0
    assert not engine.worker._loading


def agree(got: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert same(one, other), f"answer {index}"


def test_a9_preempted_requests_go_on_as_if_nothing_had_happened(
    engine: Engine, plain: dict[str, list[Answer]]
) -> None:
    preempted = 0
    scheduler = engine.core.scheduler
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(*arguments, **options)

    scheduler._preempt_request = counted
    try:
        for _ in range(2):
            agree(engine.ask(*prompts(8, 2), tokens=120), plain["long"])
    finally:
        scheduler._preempt_request = preempt
    assert preempted > 0


def test_a3_what_vllm_holds_itself_is_never_written_again(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    paged, load = engine.worker._paged, engine.worker._load
    scatter = paged.scatter

    def noted(*arguments: Any, **options: Any) -> None:
        begun.append((arguments[0].start, arguments[0].stop))
        load(*arguments, **options)

    def checked(arrays: Any, tables: Any, position: int, start: int, count: int) -> None:
        low, high = begun[-1]
        assert low <= position
        assert position + count <= high
        scatter(arrays, tables, position, start, count)

    for length, wanted in zip(EDGES, plain["edges"], strict=True):
        agree(engine.ask(prompt(length, 7)), [wanted])  # each begins with the one before
    monkeypatch.setattr(engine.worker, "_load", noted)
    monkeypatch.setattr(paged, "scatter", checked)
    for held in (0, 130, 260):  # tokens of which vLLM's cache holds the full blocks, where it has one
        for length, wanted in zip(EDGES, plain["edges"], strict=True):
            engine.llm.reset_prefix_cache()
            if held:
                engine.ask(prompt(length, 7)[:held], tokens=1)
            begun.clear()
            agree(engine.ask(prompt(length, 7)), [wanted])
            own = engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
            kept = min(held, length - 1) // 128 * 128 if own else 0
            assert [low for low, _ in begun] in ([kept], [])
            assert begun or length - 1 - kept < 16 or length < 272
    assert not engine.cache.stats().failures


def test_a6_lookups_that_no_load_follows_leave_nothing_behind(engine: Engine) -> None:
    text = prompt(600, 3)
    engine.ask(text)
    scheduler = engine.connector._scheduler
    for number in range(2000):
        request = waiting(f"looked-up-{number}", text)
        assert scheduler.matched(request, 0) == 592
        if number % 2:
            # vLLM's own cache holds as much meanwhile, or has no room for what is found: nothing is loaded.
            scheduler.allocated(request, ([1, 2, 3, 4, 5],), 0)
        scheduler.finished(request, ([],))
    assert engine.cache.stats().tiers["memory"].leased == 0
    assert not scheduler._requests


def waiting(name: str, text: list[int]) -> Any:
    """As much of vLLM's Request as a lookup and an end without a step need."""
    return SimpleNamespace(
        request_id=name, prompt_token_ids=text, num_prompt_tokens=len(text), num_tokens=len(text),
        _all_token_ids=text, num_computed_tokens=0, num_in_flight_tokens=0, prompt_embeds=None,
        prompt_is_token_ids=None, pooling_params=None, sampling_params=None, lora_request=None,
        cache_salt=None, mm_features=[], skip_reading_prefix_cache=False, resumable=False,
        kv_transfer_params=None,
    )  # fmt: skip


def test_delays_around_every_copy_change_no_answer(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(4)
    lock = threading.Lock()
    paged = engine.worker._paged

    def late(copy: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*arguments: Any) -> None:
            with lock:
                before, after = source.random() * 0.02, source.random() * 0.02
            time.sleep(before)
            copy(*arguments)
            time.sleep(after)

        return wrapper

    monkeypatch.setattr(paged, "gather", late(paged.gather))
    monkeypatch.setattr(paged, "scatter", late(paged.scatter))
    monkeypatch.setattr("retain.engines.vllm.worker.AT_ONCE_TOKENS", 0)
    for _ in range(3):
        agree(engine.ask(*prompts(16, 1), tokens=24), plain["many"])
    assert engine.cache.stats().counters["loaded_tokens"] > 0


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_load_that_ends_early_is_completed_by_computing(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    agree(engine.ask(prompt(600, 3)), plain["one"])
    engine.llm.reset_prefix_cache()
    load = engine.cache.load

    def short(hit: Any, **options: Any) -> Any:
        loaded = load(hit, **options)
        object.__setattr__(loaded, "blocks", loaded.blocks[:keep])
        object.__setattr__(loaded, "lengths", loaded.lengths[:keep])
        return loaded

    monkeypatch.setattr(engine.cache, "load", short)
    agree(engine.ask(prompt(600, 3)), plain["one"])
    monkeypatch.undo()
    engine.llm.reset_prefix_cache()
    again = engine.ask(prompt(600, 3))
    assert again[0].cached == 592
    agree(again, plain["one"])


def test_a_load_that_raises_is_answered_by_computing(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(engine.ask(prompt(600, 3)), plain["one"])
    engine.llm.reset_prefix_cache()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the medium failed")

    for name in ("load", "claim"):
        monkeypatch.setattr(engine.cache, name, broken)
        agree(engine.ask(prompt(600, 3)), plain["one"])
        monkeypatch.undo()
        engine.llm.reset_prefix_cache()
    monkeypatch.setattr(engine.worker._paged, "scatter", broken)
    agree(engine.ask(prompt(600, 3)), plain["one"])
    assert engine.cache.stats().failures


def test_what_leaves_the_cache_between_lookup_and_load_is_computed(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ask(prompt(600, 3))
    engine.llm.reset_prefix_cache()
    claim = engine.cache.claim

    def emptied(*arguments: Any) -> Any:
        hit = claim(*arguments)
        engine.cache.clear()
        return hit

    monkeypatch.setattr(engine.cache, "claim", emptied)
    agree(engine.ask(prompt(600, 3)), plain["one"])


def test_hooks_that_raise_do_not_end_the_engine(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    engine.ask(prompt(600, 3))
    engine.llm.reset_prefix_cache()
    for owner, name in (
        (engine.cache, "lookup"),
        (engine.cache, "reserve"),
        (engine.connector._scheduler, "_advance"),
        (engine.connector._scheduler, "_finish"),
        (engine.connector._scheduler, "sources"),
        (engine.worker, "_store"),
        (engine.worker._loaders, "submit"),
    ):
        monkeypatch.setattr(owner, name, broken)
        monkeypatch.setattr("retain.engines.vllm.worker.AT_ONCE_TOKENS", 0)
        agree(engine.ask(prompt(600, 3)), plain["one"])
        monkeypatch.undo()
        engine.llm.reset_prefix_cache()


def test_a_reset_also_removes_what_was_on_its_way_into_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = engine.worker._paged
    gather = paged.gather
    begun, go_on = threading.Event(), threading.Event()

    def waiting(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        gather(*arguments)

    monkeypatch.setattr(paged, "gather", waiting)
    monkeypatch.setattr(engine.worker, "flush", lambda _: True)  # as in another process
    from vllm import SamplingParams

    driver = engine.llm.llm_engine
    parameters = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False)
    driver.add_request("late", {"prompt_token_ids": prompt(300, 6)}, parameters)
    engine.step(begun.is_set)
    assert engine.connector.reset_cache()
    go_on.set()
    engine.step(lambda: not engine.core.scheduler.has_requests())
    monkeypatch.undo()
    engine.settle()
    assert engine.cache.stats().tiers["memory"].objects == 0
    engine.llm.reset_prefix_cache()
    assert engine.ask(prompt(300, 6))[0].cached == 0


def test_requests_can_be_aborted_at_any_moment(
    engine: Engine, plain: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    paged = engine.worker._paged
    scatter = paged.scatter

    def slow(*arguments: Any) -> None:
        time.sleep(0.01)
        scatter(*arguments)

    monkeypatch.setattr(paged, "scatter", slow)
    monkeypatch.setattr("retain.engines.vllm.worker.AT_ONCE_TOKENS", 0)
    texts = prompts(16, 1)
    engine.ask(*texts, tokens=24)
    engine.llm.reset_prefix_cache()
    driver = engine.llm.llm_engine
    source = random.Random(5)
    parameters = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    for round_ in range(12):
        names = [f"{round_}-{i}" for i in range(6)]
        for name in names:
            driver.add_request(name, {"prompt_token_ids": source.choice(texts)}, parameters)
        for _ in range(source.randrange(0, 8)):
            driver.step()
        driver.abort_request(source.sample(names, 4))
        for _ in range(source.randrange(0, 4)):
            driver.step()
        driver.abort_request(names)
    engine.step(lambda: not engine.core.scheduler.has_requests())
    assert not engine.core.scheduler.requests
    monkeypatch.undo()
    engine.llm.reset_prefix_cache()
    agree(engine.ask(*texts, tokens=24), plain["many"])
