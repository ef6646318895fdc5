"""Audits: a hit that is what the model computes passes, one that is not is found, named and dropped."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from retain.block import Block
from retain.cache import Cache, Query
from retain.engines.transformers import Sampling, attach
from tests.engines.transformers.test_reuse import answer
from tests.engines.transformers.tiny import gemma3, llama, prompt, text_of

pytestmark = pytest.mark.engine


def counts(cache: Cache) -> tuple[int, int]:
    counters = cache.stats().counters
    return counters["audits"], counters["audit_failures"]


@pytest.mark.parametrize(
    "make", [llama, gemma3, lambda: llama(dtype=torch.bfloat16)], ids=["llama", "gemma3", "bfloat16"]
)
def test_hits_that_are_right_pass(cache: Cache, make: Any) -> None:
    with attach(make(), None, cache, audit=1.0) as engine:
        answer(engine, prompt(1100))
        assert counts(cache) == (0, 0)
        for length in (1100, 1090, 700):
            answer(engine, prompt(length))
        engine.forward(torch.tensor([prompt(900)]))
        assert engine.settle()
        engine.generate(torch.tensor([prompt(1100)]), max_new_tokens=3, do_sample=False)
        assert engine.settle()
        assert counts(cache) == (5, 0)


def test_a_wrong_block_is_found_named_and_dropped(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = llama(), prompt(1100)
    with attach(model, None, cache, audit=1.0) as engine:
        expected, _ = answer(engine, tokens)
        keys = engine.chain(tokens)
        query = Query(keys, engine.spec)
        with cache.load(cache.lookup(query, plan=False)) as loaded:
            right = loaded.blocks[2]
            arrays = {name: np.array(array) for name, array in right.arrays.items()}
            header = replace(right.header)
            ids = np.array(right.tokens)
        arrays["v"][1, 0, 100] += 0.01
        cache.drop([keys.keys[2]])
        assert cache.store(Block(header, ids, arrays)).kept

        with caplog.at_level(logging.ERROR, "retain.audit"):
            _, report = answer(engine, tokens)
        assert report.reused_tokens > 1024
        assert counts(cache) == (1, 1)
        assert f"wrong blocks: {keys.keys[2].hex()};" in caplog.text
        assert cache.missing(query) == [2]

        text, report = answer(engine, tokens)
        assert text == expected == text_of(model, tokens, 6)
        assert report.reused_tokens == 512
        assert counts(cache) == (2, 1)


def test_audits_wait_until_the_model_is_idle_and_at_most_one_waits(cache: Cache) -> None:
    with attach(llama(), None, cache, audit=1.0) as engine:
        answer(engine, prompt(300))
        for step in engine.stream(prompt(300), Sampling(max_tokens=3)):
            del step
        running = engine.stream(prompt(300), Sampling(max_tokens=600))
        next(running)
        assert not engine.settle(0.3)
        assert len(list(running)) == 599
        assert engine.settle()
        audits, failed = counts(cache)
        assert audits + cache.stats().counters["audits_skipped"] == 2
        assert failed == 0


def test_no_hit_is_audited_unless_asked_for(cache: Cache) -> None:
    with attach(llama(), None, cache) as engine:
        for _ in range(3):
            answer(engine, prompt(300))
        assert counts(cache) == (0, 0)
    with pytest.raises(ValueError, match="share of hits"):
        attach(llama(), None, cache, audit=3.0)
