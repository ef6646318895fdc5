"""A codec a tier, end to end: coded KV serves who accepts it, and what is computed on it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.cache import Cache, Query
from retain.codecs.ladder import shelf
from retain.codecs.ladder.measured import LEAST_TOKENS, is_switched_off, measured
from retain.engines.transformers import Engine, Sampling, attach
from retain.errors import ConfigError
from retain.fidelity import PROMISED, lineage_of
from tests.engines.transformers.tiny import logits_of
from tests.profile.conftest import learned, text, tiny

pytestmark = pytest.mark.engine

Open = Callable[..., Cache]


def ask(engine: Engine, tokens: list[int], count: int = 4, **more: Any) -> Any:
    """The report of a request, once everything is stored and written."""
    generation = engine.stream(tokens, Sampling(max_tokens=count), **more)
    assert len(list(generation)) == count
    assert engine.settle()
    assert engine.cache.flush()
    return generation.report


def prompt(seed: int, count: int) -> list[int]:
    found: list[int] = text(seed, count).tolist()
    return found


@pytest.mark.parametrize("level", ["near", "tiny"])
def test_a_level_serves_who_accepts_it_and_never_who_asks_for_exact(
    profiled: Callable[[str], Any], opened: Open, tmp_path: Path, level: str
) -> None:
    model = profiled("llama-gqa")
    tokens = prompt(70, 700)
    cache = opened("memory:64MiB", f"disk:{tmp_path / 'kv'}?codec={level}")
    with attach(model, None, cache) as engine:
        assert ask(engine, tokens).fidelity == "exact"
        size = sum(file.stat().st_size for file in (tmp_path / "kv").rglob("*.*") if file.is_file())
        assert size < 750 * engine.spec.token_bytes / 2
        cache.clear(tier="memory")

        assert ask(engine, tokens, fidelity="exact").reused_tokens == 0
        cache.clear(tier="memory")
        assert ask(engine, tokens, fidelity="fine").reused_tokens == 0
        cache.clear(tier="memory")
        report = ask(engine, tokens, fidelity=level)
        assert report.reused == {"disk": 699 // 16 * 16}
        assert report.fidelity == "lossy"
        found = engine.forward(torch.tensor([tokens]), fidelity=level)
        assert found.report.reused_tokens == 699 // 16 * 16
        wanted = torch.softmax(logits_of(model, tokens), -1)
        distance = (wanted - torch.softmax(found.logits[0, -1], -1)).abs().max()
        assert 0 < float(distance) < 0.2


def test_what_is_computed_on_coded_kv_carries_its_lineage(
    profiled: Callable[[str], Any], opened: Open, tmp_path: Path
) -> None:
    model = profiled("llama-gqa")
    longer = prompt(71, 1100)
    cache = opened("memory:64MiB", f"disk:{tmp_path / 'kv'}?codec=near")
    with attach(model, None, cache, fidelity="near") as engine:
        ask(engine, longer[:520])
        cache.clear(tier="memory")
        assert ask(engine, longer).reused_tokens == 512

        def blocks(fidelity: str) -> list[tuple[str, bytes | None]]:
            query = Query(engine.chain(longer), engine.spec, fidelity=fidelity, limit=1024)
            with cache.load(cache.lookup(query, plan=False)) as loaded:
                return [(block.header.fidelity, block.header.lineage) for block in loaded.blocks]

        assert blocks("near") == [("lossy", lineage_of("near"))] * 4
        assert blocks("exact") == blocks("fine") == []
        # What an exact reader computes stands beside it under another name, and is preferred from then on.
        assert ask(engine, longer, fidelity="exact").reused_tokens == 0
        assert blocks("exact") == blocks("near") == [("exact", None)] * 4


def test_a_missing_profile_is_a_miss_that_says_so_and_deletes_nothing(
    profiled: Callable[[str], Any], opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = profiled("llama-gqa")
    tokens = prompt(72, 600)
    cache = opened("memory:64MiB", f"disk:{tmp_path / 'kv'}?codec=near")
    with attach(model, None, cache, fidelity="near") as engine:
        ask(engine, tokens)
        before = sorted(file.name for file in (tmp_path / "kv").rglob("*") if file.is_file())
        cache.clear(tier="memory")
        for each in shelf.shelved():
            each.path.unlink()
        report = ask(engine, tokens)
        assert report.reused_tokens == 0
        assert "needs the profile" in caplog.text
        after = sorted(file.name for file in (tmp_path / "kv").rglob("*") if file.is_file())
        assert set(before) <= set(after)


def test_the_audit_measures_coded_hits_and_keeps_what_it_found(
    profiled: Callable[[str], Any], opened: Open, tmp_path: Path
) -> None:
    model = profiled("llama-gqa")
    tokens = prompt(73, 700)
    cache = opened("memory:64MiB", f"disk:{tmp_path / 'kv'}?codec=balanced")
    with attach(model, None, cache, fidelity="balanced", audit=1.0) as engine:
        ask(engine, tokens[:600])
        cache.clear(tier="memory")
        ask(engine, tokens)
        found = measured(engine.spec.kin)["balanced"]
        assert found.tokens >= 100
        assert 0 < found.kl < 3 * PROMISED["balanced"]
        assert not found.off
        assert cache.stats().counters["audit_failures"] == 0


def test_a_level_that_loses_more_than_it_promises_is_switched_off_and_says_so(
    profiled: Callable[[str], Any], opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = profiled("llama-gqa")
    good = learned("llama-gqa")
    shelf.keep(replace(good, step=40 * good.step))  # as if the model had changed under its profile
    cache = opened("memory:64MiB", f"disk:{tmp_path / 'kv'}?codec=near")
    with (
        attach(model, None, cache, fidelity="near", audit=1.0) as engine,
        caplog.at_level(logging.ERROR, "retain.codecs"),
    ):
        for seed in range(2 * LEAST_TOKENS // 180):
            tokens = prompt(80 + seed, 600)
            ask(engine, tokens[:420])
            cache.clear(tier="memory")
            ask(engine, tokens)
        assert is_switched_off(engine.spec.kin, "near")
        assert "near is switched off" in caplog.text

        tokens = prompt(80, 600)
        cache.clear(tier="memory")
        assert ask(engine, tokens, fidelity="near").reused_tokens == 0  # what was kept so is not used
        fresh = prompt(90, 600)
        ask(engine, fresh)
        cache.clear(tier="memory")
        assert ask(engine, fresh).reused_tokens > 0  # int8 in its place
    assert not is_switched_off(tiny("llama-mqa")[1].spec.kin, "near")


def test_a_fidelity_that_does_not_exist_is_refused(opened: Open) -> None:
    model, _ = tiny("llama-gqa")
    with pytest.raises(ConfigError, match="fidelity must be one of exact, fine"):
        attach(model, None, opened(), fidelity="good")
    with attach(model, None, opened()) as engine, pytest.raises(ConfigError, match="got 'high'"):
        engine.stream(prompt(1, 20), fidelity="high")
