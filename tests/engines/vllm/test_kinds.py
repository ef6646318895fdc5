"""Requests of every kind: drafts, adapters, pictures, embeddings; and what vLLM's own hooks are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retain.identity import space_of

from .conftest import Engine, prompt, same


def adapter(folder: Path, scale: float) -> Path:
    """A LoRA adapter of the tiny Llama that changes its keys."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 256, generator=random) * scale
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 8, generator=random) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine], tiny_llama: Path) -> Engine:
    return engines(
        tiny_llama,
        {"tiers": ["memory:256MiB"]},
        max_num_batched_tokens=192,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        disable_log_stats=False,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )


def test_a19_adapters_of_the_same_name_and_other_content_share_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    text = prompt(400, 30)
    one, other = adapter(tmp_path / "one", 0.3), adapter(tmp_path / "other", 0.5)
    plain = engine.ask(text)[0]

    def ask(number: int, path: Path) -> Any:
        answers = engine.llm.generate
        try:
            engine.llm.generate = lambda *a, **k: answers(
                *a, lora_request=LoRARequest("mine", number, str(path)), **k
            )
            return engine.ask(text)[0]
        finally:
            engine.llm.generate = answers

    first = ask(1, one)
    assert first.cached == 0
    assert first.tokens != plain.tokens
    second = ask(2, other)
    assert second.cached == 0
    again = ask(1, one)
    assert again.cached == 399
    assert same(again, first)
    assert same(engine.ask(text)[0], plain)


def test_the_hooks_are_told_of_hits_loads_and_stored_blocks(engine: Engine) -> None:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    connector = engine.connector
    connector.take_events()
    sources: list[Any] = []
    told = connector.get_external_cache_hit_sources

    def noted(*arguments: Any) -> Any:
        sources.append(told(*arguments))
        return sources[-1]

    connector.get_external_cache_hit_sources = noted
    taken: list[Any] = []
    take = connector.take_events

    def kept() -> Any:
        events = take()
        taken.extend(events)
        return events

    connector.take_events = kept
    try:
        engine.ask(prompt(300, 31))
        engine.ask(prompt(300, 31))
    finally:
        connector.take_events, connector.get_external_cache_hit_sources = take, told
    assert sources == [{CacheHitSource.HOST: 299}]
    stored = [event for event in (*taken, *connector.take_events()) if isinstance(event, BlockStored)]
    assert sum(len(event.block_hashes) for event in stored) == 2
    assert stored[0].token_ids == prompt(300, 31)[:256]
    found: dict[str, Any] = {each.name: getattr(each, "value", 0) for each in engine.llm.get_metrics()}
    assert found["vllm:retain_load_tokens"] >= 299
    assert found["vllm:external_prefix_cache_hits"] >= 299


def test_a13_figures_that_make_no_sense_end_no_request_and_lower_no_counter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retain.engines.vllm.metrics import Counts, Stats

    def told() -> dict[str, Any]:
        return {
            each.name: each.value for each in engine.llm.get_metrics() if each.name.startswith("vllm:retain_")
        }

    text = prompt(300, 33)
    first = engine.ask(text)[0]
    before = told()
    monkeypatch.setattr(
        Counts, "take", lambda self: Stats(data={"load_tokens": -7, "save_tokens": -1, "unheard_of": 3})
    )
    assert same(engine.ask(text)[0], first)
    after = told()
    assert all(after[name] >= value for name, value in before.items())

    def broken(self: Counts) -> Stats:
        raise ValueError("no figures today")

    monkeypatch.setattr(Counts, "take", broken)
    assert same(engine.ask(text)[0], first)
    monkeypatch.undo()
    assert same(engine.ask(text)[0], first)
    assert told()["vllm:retain_load_tokens"] > after["vllm:retain_load_tokens"]


def request_of(**changes: Any) -> Any:
    """As much of vLLM's Request as tells whose KV it is."""
    given: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": prompt(300),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "pooling_params": None,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "resumable": False,
        "num_tokens": 300,
        "_all_token_ids": prompt(300),
    }
    return SimpleNamespace(**{**given, **changes})


def test_requests_whose_tokens_are_unknown_or_whose_result_needs_all_work_take_no_part(
    engine: Engine,
) -> None:
    scheduler = engine.connector._scheduler
    for changes in (
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"prompt_is_token_ids": [True]},
        {"pooling_params": object()},
    ):
        assert scheduler._whose(request_of(**changes)) is None, changes
        assert scheduler.matched(request_of(request_id=str(changes), **changes), 0) == 0


def test_a18_media_count_by_content_and_place(engine: Engine) -> None:
    from retain.engines.vllm.requests import Tracked, media_of

    def keys(*spans: tuple[int, str]) -> tuple[bytes, ...]:
        features = [
            SimpleNamespace(
                modality="image",
                identifier=content,
                mm_hash=content,
                mm_position=SimpleNamespace(offset=offset, length=20),
            )
            for offset, content in spans
        ]
        request = request_of(mm_features=features, num_tokens=600, _all_token_ids=prompt(600))
        whose = engine.connector._scheduler._whose(request)
        return Tracked(request, whose, media_of(request), reads=True, stores=True).chain().keys

    none, cat, dog, later = keys(), keys((300, "cat")), keys((300, "dog")), keys((310, "cat"))
    assert none[0] == cat[0] == dog[0] == later[0]  # the text before is shared
    assert len({none[1], cat[1], dog[1], later[1]}) == 4
    assert keys((300, "cat"), (400, "dog"))[1] != keys((300, "dog"), (400, "cat"))[1]


def test_a_salt_and_a_tenant_make_spaces_of_their_own(engine: Engine) -> None:
    scheduler = engine.connector._scheduler
    spec = scheduler._spec
    assert scheduler._whose(request_of()).space == space_of(spec.kin)
    spaces = {scheduler._whose(request_of(cache_salt=salt)).space for salt in (None, "", "a", "b")}
    assert len(spaces) == 4
