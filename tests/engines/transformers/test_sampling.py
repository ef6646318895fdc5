"""The next token: the likeliest, or drawn by temperature and top-p with a seed, with its log probability."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from retain.cache import Cache
from retain.engines.transformers import Sampling, attach
from retain.engines.transformers.sampling import Sampler
from retain.errors import UnsupportedInput
from tests.engines.transformers.tiny import llama, logits_of, prompt, text_of

pytestmark = pytest.mark.engine

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]))


def drawn(count: int = 2000, **settings: Any) -> Counter[int]:
    sampler = Sampler(Sampling(seed=1, **settings))
    return Counter(sampler.choose(LOGITS).token for _ in range(count))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(temperature=0.0) == {0: 2000}
    assert drawn(temperature=1e-9) == {0: 2000}


def test_tokens_are_drawn_in_proportion() -> None:
    shares = drawn(temperature=1.0)
    for token, share in enumerate((0.5, 0.25, 0.125, 0.0625, 0.0625)):
        assert abs(shares[token] / 2000 - share) < 0.04
    flat = drawn(temperature=100.0)
    assert min(flat.values()) > 300


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.875, {0, 1, 2}), (1.0, {*range(5)})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, allowed: set[int]) -> None:
    assert set(drawn(temperature=1.0, top_p=top_p)) == allowed


def test_equal_seeds_give_equal_answers_with_and_without_kept_kv(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:

        def ask(seed: int | None) -> list[int]:
            return [step.token for step in engine.stream(prompt(300), Sampling(20, 1.0, 0.9, seed))]

        assert ask(3) == ask(3)
        assert ask(3) != ask(4)
        assert ask(None) != ask(None)
        assert ask(-1) == ask(-1)


def test_log_probabilities_are_the_models_own(cache: Cache) -> None:
    model = llama()
    with attach(model, None, cache) as engine:
        steps = list(engine.stream(prompt(40), Sampling(8, temperature=0.7, seed=2, top_logprobs=3)))
    tokens = prompt(40)
    for step in steps:
        expected = torch.log_softmax(logits_of(model, tokens), -1)
        assert step.logprob == pytest.approx(float(expected[step.token]), abs=1e-4)
        best = torch.topk(expected, 3)
        assert [token for token, _ in step.top] == best.indices.tolist()
        assert [value for _, value in step.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        tokens.append(step.token)


def test_without_being_asked_for_there_are_no_log_probabilities(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:
        steps = list(engine.stream(prompt(20), Sampling(2)))
    assert [(step.logprob, step.top) for step in steps] == [(None, ())] * 2


def test_an_answer_ends_at_a_stop_token_or_at_its_length(cache: Cache) -> None:
    model = llama()
    text = text_of(model, prompt(40), 10)
    with attach(model, None, cache) as engine:
        steps = list(engine.stream(prompt(40), Sampling(10), stop={text[6]}))
        end = text.index(text[6])
        assert [step.token for step in steps] == text[: end + 1]
        assert [step.finish for step in steps] == [None] * end + ["stop"]
        steps = list(engine.stream(prompt(40), Sampling(10)))
        assert [step.finish for step in steps] == [None] * 9 + ["length"]
        model.generation_config.eos_token_id = [text[6]]
        assert [step.token for step in engine.stream(prompt(40), Sampling(10))] == text[: end + 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_logprobs": -1},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInput, match=next(iter(settings))):
        Sampling(**settings)
