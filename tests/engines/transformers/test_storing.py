"""What an engine stores: each completed block once, one tail, nothing that was not computed, and for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from retain.cache import Cache, Query
from retain.engines.transformers import Engine, Sampling, attach
from tests.engines.transformers.test_reuse import answer, usable
from tests.engines.transformers.tiny import gemma3, llama, prompt, text_of

pytestmark = pytest.mark.engine


def stored(cache: Cache) -> int:
    return cache.stats().counters["stored_blocks"]


def kept(engine: Engine, tokens: list[int], **space: Any) -> int:
    """How many of the tokens a lookup would find."""
    with engine.cache.lookup(Query(engine.chain(tokens, **space), engine.spec)) as hit:
        return hit.tokens


def test_a4_a_long_answer_is_stored_in_whole_blocks_and_one_tail(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:
        text, report = answer(engine, prompt(100), 800)
        # 899 tokens have KV: the last one sampled was never run.
        assert stored(cache) == 4
        assert report.written == 3 * 256 + 128 == 896
        assert kept(engine, prompt(100) + text) == 896
        again, report = answer(engine, prompt(100), 800)
        assert again == text
        assert stored(cache) == 4
        assert report.written == 0


@pytest.mark.parametrize("make", [llama, gemma3])
def test_kv_of_generated_tokens_is_right(cache: Cache, make: Callable[[], Any]) -> None:
    model = make()
    with attach(model, None, cache) as engine:
        text, _ = answer(engine, prompt(150), 700)
        for length in (400, 512, 840):
            tokens = (prompt(150) + text)[:length]
            found, report = answer(engine, tokens)
            assert report.reused_tokens == usable(length - 1)
            assert found == text_of(model, tokens, 6)


def test_generate_stores_as_stream_does(cache: Cache) -> None:
    model = llama()
    with attach(model, None, cache) as engine:
        result = engine.generate(torch.tensor([prompt(100)]), max_new_tokens=500, do_sample=False)
        assert engine.settle()
        assert stored(cache) == 3
        assert engine.last_report.written == 592
        assert engine.last_report.generated == 500
        assert kept(engine, result[0].tolist()) == 592


def test_prompts_only_and_whole_blocks_only(opened: Callable[..., Cache]) -> None:
    model = llama()
    with attach(model, None, opened(), store_generated=False) as engine:
        text, report = answer(engine, prompt(300), 300)
        assert kept(engine, prompt(300) + text) == report.written == 288
    with attach(model, None, opened(), tails=False) as engine:
        text, report = answer(engine, prompt(300), 300)
        assert kept(engine, prompt(300) + text) == report.written == 512
    with attach(model, None, opened(), tails=False, store_generated=False) as engine:
        text, report = answer(engine, prompt(300), 300)
        assert kept(engine, prompt(300) + text) == report.written == 256


def test_an_answer_that_is_not_read_to_its_end_keeps_what_it_completed(cache: Cache) -> None:
    with (
        attach(llama(), None, cache) as engine,
        engine.stream(prompt(200), Sampling(max_tokens=900)) as generation,
    ):
        text = [next(generation).token for _ in range(120)]
        generation.close()
        assert engine.settle()
        assert engine.queue_depth == 0
        assert kept(engine, prompt(200) + text) == (200 + 119) // 16 * 16
        assert generation.report.generated == 120


def test_an_exception_inside_generate_keeps_the_prompt_and_reaches_the_caller(cache: Cache) -> None:
    class Unplugged:
        puts = 0

        def put(self, tokens: Any) -> None:
            self.puts += 1
            if self.puts > 4:
                raise ConnectionError("the reader is gone")

        def end(self) -> None:
            """Never comes to that."""

    with attach(llama(), None, cache) as engine:
        with pytest.raises(ConnectionError):
            engine.generate(
                torch.tensor([prompt(300)]), max_new_tokens=50, do_sample=False, streamer=Unplugged()
            )
        assert engine.settle()
        assert engine.queue_depth == 0
        assert kept(engine, prompt(300)) == 288


def test_a_cancelled_generation_ends_at_the_next_token(cache: Cache) -> None:
    cancelled = threading.Event()
    with attach(llama(), None, cache) as engine:
        generation = engine.stream(prompt(300), Sampling(max_tokens=900), cancelled=cancelled)
        next(generation)
        cancelled.set()
        assert list(generation) == []
        assert engine.settle()
        assert kept(engine, prompt(300)) == 288


def test_a_cancelled_prefill_ends_between_layers_and_leaves_the_model_as_it_was(cache: Cache) -> None:
    model = llama(num_hidden_layers=6)
    seen: list[float] = []
    with attach(model, None, cache) as engine:
        generation = engine.stream(
            prompt(600), Sampling(max_tokens=5), cancelled=lambda: len(seen) >= 3, progress=seen.append
        )
        assert list(generation) == []
        assert seen[:3] == [0, 1 / 6, 2 / 6]
        assert engine.settle()
        assert stored(cache) == 0
        assert engine.queue_depth == 0
        assert answer(engine, prompt(600))[0] == text_of(model, prompt(600), 6)


def test_a_request_that_is_cancelled_while_it_waits_never_runs(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:
        first = engine.stream(prompt(50), Sampling(max_tokens=400))
        next(first)
        cancelled = threading.Event()
        ended: list[Any] = []
        waiting = threading.Thread(
            target=lambda: ended.append(list(engine.stream(prompt(60, 9), Sampling(), cancelled=cancelled)))
        )
        waiting.start()
        while engine.queue_depth < 2:
            pass
        cancelled.set()
        waiting.join(10)
        assert ended == [[]]
        assert len(list(first)) == 399
        assert engine.queue_depth == 0


def test_tenants_and_salts_do_not_see_each_other(cache: Cache) -> None:
    with attach(llama(), None, cache, tenant="house") as engine:
        answer(engine, prompt(300))
        spaces: list[dict[str, Any]] = [{"tenant": "other"}, {"salt": "s"}, {"tenant": "other", "salt": "s"}]
        for space in spaces:
            _, report = answer(engine, prompt(300), **space)
            assert report.reused_tokens == 0
            _, report = answer(engine, prompt(300), **space)
            assert report.reused_tokens == 299
        assert answer(engine, prompt(300))[1].reused_tokens == 299


def test_changed_weights_are_another_model(cache: Cache) -> None:
    model = llama()
    with attach(model, None, cache) as engine:
        answer(engine, prompt(300))
        before = engine.spec
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3] *= 2.0
        text, report = answer(engine, prompt(300))
        assert report.reused_tokens == 0
        assert text == text_of(model, prompt(300), 6)
        assert engine.spec.variant != before.variant
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3] /= 2.0
        assert answer(engine, prompt(300))[1].reused_tokens == 299

        late = engine.stream(prompt(290), Sampling(max_tokens=1))
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight[3] *= 2.0
        assert len(list(late)) == 1
        assert late.report.reused_tokens == 0


def test_requests_for_one_prompt_compute_it_once(cache: Cache) -> None:
    tokens = prompt(1030)
    engines = [attach(llama(), None, cache) for _ in range(3)]
    results: list[tuple[list[int], Any]] = []

    def ask(engine: Engine) -> None:
        results.append(answer(engine, tokens, 4))

    threads = [threading.Thread(target=ask, args=(engine,)) for engine in engines for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for engine in engines:
        engine.close()
    assert len(results) == 6
    assert len({tuple(text) for text, _ in results}) == 1
    assert sorted(report.reused_tokens for _, report in results)[:2] == [0, 1024]


def test_prefills_are_told_to_the_planner(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:
        assert cache.planner.prefill_seconds(engine.spec, 0, 100) is None
        answer(engine, prompt(300))
        predicted = cache.planner.prefill_seconds(engine.spec, 0, 300)
        assert predicted is not None
        assert 0 < predicted < 10
