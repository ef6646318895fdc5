"""Calls that kept KV cannot serve are refused with a sentence, and a caller's cache is the caller's own."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from retain.cache import Cache
from retain.engines.transformers import Engine, Sampling, attach
from retain.errors import UnsupportedInput, UnsupportedModel
from tests.engines.transformers.test_reuse import answer
from tests.engines.transformers.tiny import gemma3, llama, logits_of, prompt, text_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def engine(model: Any, cache: Cache) -> Iterator[Engine]:
    with attach(model, None, cache) as attached:
        yield attached


IDS = torch.tensor([prompt(40)])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": ({"input_ids": torch.cat([IDS, IDS])}, "a batch of 2 prompts"),
    "no tokens": ({"input_ids": IDS[:, :0]}, "no tokens"),
    "fractions": ({"input_ids": IDS.float()}, "whole numbers"),
    "negative tokens": ({"input_ids": -IDS}, "not token ids"),
    "tokens beyond the vocabulary": ({"input_ids": IDS + 300}, "vocabulary of 300"),
    "left padding": ({"attention_mask": torch.tensor([[0] * 3 + [1] * 37])}, "padded or masked"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 37 + [0] * 3])}, "padded or masked"),
    "a mask that is too short": ({"attention_mask": torch.ones(1, 30)}, "[1, 30] for 40 tokens"),
    "a mask that is too long": ({"attention_mask": torch.ones(1, 50)}, "[1, 50] for 40 tokens"),
    "a mask of two rows": ({"attention_mask": torch.ones(2, 40)}, "[2, 40] for 40 tokens"),
    "shifted positions": (
        {"position_ids": torch.arange(1, 41)[None]},
        "position_ids must count from 0 to 39",
    ),
}

REFUSED_BY_GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    **REFUSED,
    "a cache": ({"past_key_values": DynamicCache()}, "past_key_values cannot be combined"),
    "a cache by its new name": ({"cache": DynamicCache()}, "cache cannot be combined"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 40, 64)}, "inputs_embeds cannot be combined"),
    "pixels": ({"pixel_values": torch.zeros(1)}, "pixel_values is not known"),
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "several answers": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "a static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states=True"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a28_forward_refuses_inputs_that_do_not_fit_kept_kv(engine: Engine, case: str) -> None:
    given, sentence = REFUSED[case]
    with pytest.raises(UnsupportedInput) as refused:
        engine.forward(**{"input_ids": IDS, **given})
    assert sentence in str(refused.value)
    assert engine.queue_depth == 0


@pytest.mark.parametrize("case", REFUSED_BY_GENERATE)
def test_a28_generate_refuses_inputs_that_do_not_fit_kept_kv(engine: Engine, case: str) -> None:
    given, sentence = REFUSED_BY_GENERATE[case]
    with pytest.raises(UnsupportedInput) as refused:
        engine.generate(**{"input_ids": IDS, "max_new_tokens": 2, **given})
    assert sentence in str(refused.value)
    assert engine.queue_depth == 0


def test_a28_positions_count_from_the_true_length_of_the_kept_prefix(model: Any, engine: Engine) -> None:
    answer(engine, prompt(300), 1)
    longer = torch.tensor([prompt(350)])
    masks: list[dict[str, Any]] = [
        {},
        {"attention_mask": torch.ones(1, 350)},
        {"position_ids": torch.arange(350)[None]},
    ]
    for given in masks:
        warm = engine.forward(longer, **given)
        assert warm.report.reused_tokens >= 288
        assert torch.allclose(warm.logits[0, -1], logits_of(model, prompt(350)), atol=1e-4)


def test_logits_of_several_and_of_all_tokens(model: Any, engine: Engine) -> None:
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([prompt(300)])).logits
    answer(engine, prompt(300), 1)
    some = engine.forward(torch.tensor([prompt(300)]), logits_to_keep=20)
    assert some.report.reused_tokens == 280
    assert torch.allclose(some.logits[0, -20:], whole[0, -20:], atol=1e-4)
    every = engine.forward(torch.tensor([prompt(300)]), logits_to_keep=0)
    assert every.report.reused_tokens == 0
    assert torch.allclose(every.logits, whole, atol=1e-4)


@pytest.mark.parametrize("make", [llama, gemma3])
def test_a29_what_a_caller_does_with_its_cache_changes_nothing_that_is_kept(cache: Cache, make: Any) -> None:
    model = make()
    prefix = prompt(300)
    suffixes = [prompt(20, 91), prompt(20, 92)]
    expected = [logits_of(model, prefix + suffix) for suffix in suffixes]
    with attach(model, None, cache) as engine:
        answer(engine, prefix, 1)
        for order in ((0, 1), (1, 0)):
            loaded = engine.forward(torch.tensor([prefix]))
            assert loaded.report.reused_tokens == 288
            for number in order:
                mine = copy.deepcopy(loaded.output.cache)
                with torch.no_grad():
                    found = model(input_ids=torch.tensor([suffixes[number]]), cache=mine).logits[0, -1]
                assert torch.allclose(found, expected[number], atol=1e-4)
            for layer in loaded.output.cache.layers:
                layer.keys.zero_()
                layer.rows.k.fill_(float("nan"))
        for number in (0, 1):
            again = engine.forward(torch.tensor([prefix + suffixes[number]]))
            assert again.report.reused_tokens >= 288
            assert torch.allclose(again.logits[0, -1], expected[number], atol=1e-4)


def test_a29_three_threads_continue_one_prefix(cache: Cache) -> None:
    model = llama()
    prompts = [prompt(300) + prompt(20, 90 + number) for number in range(3)]
    expected = [text_of(model, tokens, 12) for tokens in prompts]
    found: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    with attach(model, None, cache) as engine:
        answer(engine, prompt(300), 1)

        def ask(number: int) -> None:
            for _ in range(4):
                found[number].append(
                    [s.token for s in engine.stream(prompts[number], Sampling(max_tokens=12))]
                )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == {number: [text] * 4 for number, text in enumerate(expected)}


def test_a_cache_that_was_given_out_is_not_written_by_later_requests(engine: Engine) -> None:
    mine = engine.forward(torch.tensor([prompt(300)])).output.cache
    result = engine.generate(
        torch.tensor([prompt(280, 5)]), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    theirs = result.cache if "cache" in result else result.past_key_values
    before = [[layer.keys.clone() for layer in each.layers] for each in (mine, theirs)]
    for seed in range(20, 24):
        answer(engine, prompt(300, seed), 4)
    for each, keys in zip((mine, theirs), before, strict=True):
        assert all(torch.equal(layer.keys, old) for layer, old in zip(each.layers, keys, strict=True))


def test_buffers_of_finished_requests_are_used_again(engine: Engine) -> None:
    for seed in range(3):
        answer(engine, prompt(300, seed), 4)
    held = engine._host.pool.held_bytes
    assert held > 0
    for seed in range(3, 6):
        answer(engine, prompt(300, seed), 4)
    assert engine._host.pool.held_bytes == held


def test_a_cache_that_its_caller_drops_is_gone_at_once(engine: Engine) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            given = engine.forward(torch.tensor([prompt(300)]))
            kept = weakref.ref(given.output.cache)
            del given
            assert engine.settle()
            answer(engine, prompt(20))
            assert kept() is None
    finally:
        gc.enable()


def test_the_model_is_left_as_it_was(model: Any, engine: Engine) -> None:
    other = llama()
    answer(engine, prompt(300))
    engine.generate(torch.tensor([prompt(300)]), max_new_tokens=4, do_sample=False)
    assert vars(model).keys() == vars(other).keys()
    assert type(model).forward is type(other).forward
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with torch.no_grad():
        plain = model(input_ids=IDS, use_cache=True)
    assert {type(layer) for layer in plain.cache.layers} == {DynamicLayer}
    assert torch.equal(plain.logits[0, -1], logits_of(other, prompt(40)))


def test_generates_own_arguments_do_what_they_do_there(model: Any, engine: Engine) -> None:
    ids = torch.tensor([prompt(300)])
    for arguments in (
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"repetition_penalty": 1.3, "do_sample": False},
        {"do_sample": False, "eos_token_id": text_of(model, prompt(300), 5)[4]},
        {"do_sample": False, "prefill_chunk_size": 100},
    ):
        torch.manual_seed(5)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **arguments)
        for _ in range(2):
            torch.manual_seed(5)
            assert engine.generate(ids, max_new_tokens=12, **arguments).tolist() == expected.tolist()
            assert engine.settle()
        assert engine.last_report.reused_tokens > 0


def test_models_whose_kv_is_not_known_are_refused_by_name(cache: Cache) -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    mamba = MambaForCausalLM(config)
    with pytest.raises(UnsupportedModel, match="LinearAttentionLayer"):
        attach(mamba.train(False), None, cache)
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedModel, match="encoder"):
        attach(encoder.train(False), None, cache)
    with pytest.raises(UnsupportedModel, match=r"call model\.eval"):
        attach(llama().train(True), None, cache)
    with pytest.raises(UnsupportedModel, match="does not generate"):
        attach(llama().model, None, cache)


def test_a_model_put_into_training_mode_later_is_refused(cache: Cache) -> None:
    model = llama()
    with attach(model, None, cache) as engine:
        model.train()
        with pytest.raises(UnsupportedInput, match="training mode"):
            engine.forward(IDS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_kv_that_depends_on_the_prompts_length_is_not_reused(cache: Cache, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "original_max_position_embeddings": 320,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
        }
        model = llama(rope_parameters=rope, max_position_embeddings=1280)
    else:
        model = llama(rope_parameters=rope, max_position_embeddings=320)
    with attach(model, None, cache) as engine:
        for length in (300, 600, 300, 600, 310):
            text, report = answer(engine, prompt(length), 4)
            assert text == text_of(model, prompt(length), 4)
            assert bool(report.bypass) == (length == 600)
        assert report.reused_tokens == 288
