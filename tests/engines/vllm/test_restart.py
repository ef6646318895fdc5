"""Engines one after the other: what one left on disk the next one finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from .conftest import Engine, prompt, same


def test_a11_a_fresh_engine_finds_all_that_was_stored_in_several_steps_and_answers_alike(
    launch: Callable[..., Engine], tiny_llama: Path, tmp_path: Path
) -> None:
    tiers = {"tiers": ["memory:64MiB", f"disk:{tmp_path / 'kv'}?capacity=1GiB"]}
    first = launch(tiny_llama, tiers, max_num_batched_tokens=192)
    said = [first.ask(prompt(length, length))[0] for length in (513, 700)]
    assert first.cache.flush(30.0)
    first.close()

    moved = tmp_path / "elsewhere"  # the same weights in another place are the same model
    shutil.copytree(tiny_llama, moved)
    second = launch(moved, tiers, max_num_batched_tokens=192)
    for length, before in zip((513, 700), said, strict=True):
        answer = second.ask(prompt(length, length))[0]
        assert answer.cached == {513: 512, 700: 699}[length]
        assert same(answer, before)
    counters = second.cache.stats().counters
    assert counters["promoted_blocks"] > 0
    assert not second.cache.stats().failures
    second.close()


def test_other_weights_find_nothing(launch: Callable[..., Engine], tiny_llama: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    changed = tmp_path / "changed"
    shutil.copytree(tiny_llama, changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"].view(torch.int32)[-1, -1] += (
        1  # the last bit of one number
    )
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    tiers = {"tiers": ["memory:64MiB", f"disk:{tmp_path / 'kv'}?capacity=1GiB"]}
    first = launch(tiny_llama, tiers)
    first.ask(prompt(300))
    first.close()
    second = launch(changed, tiers)
    assert second.ask(prompt(300))[0].cached == 0
    second.close()


def test_a5_every_prompt_token_reaches_the_decode_side_though_the_last_step_had_only_one(
    launch: Callable[..., Engine], tiny_llama: Path, tmp_path: Path
) -> None:
    tiers = {"tiers": ["memory:64MiB", f"disk:{tmp_path / 'kv'}?capacity=1GiB"]}
    prefill = launch(tiny_llama, tiers, role="kv_producer", max_num_batched_tokens=64, max_num_seqs=8)
    said = {length: prefill.ask(prompt(length, length), tokens=1)[0] for length in (65, 321)}
    prefill.close()
    decode = launch(tiny_llama, tiers, role="kv_consumer", max_num_batched_tokens=64, max_num_seqs=8)
    for length, before in said.items():
        answer = decode.ask(prompt(length, length), tokens=8)[0]
        assert answer.cached == length - 1  # the last token is computed in any case, to have its logits
        assert answer.tokens[0] == before.tokens[0]
    decode.close()


def test_a_tier_of_a_lossy_codec_serves_those_who_accept_it_and_nobody_else(
    launch: Callable[..., Engine], tiny_llama: Path, tmp_path: Path
) -> None:
    tiers = ["memory:64MiB", f"disk:{tmp_path / 'kv'}?capacity=1GiB&codec=int8"]
    asked = prompt(700)
    first = launch(tiny_llama, {"tiers": tiers})
    exact = first.ask(asked, tokens=1)[0]
    assert first.cache.flush(30.0)
    first.close()

    strict = launch(tiny_llama, {"tiers": tiers, "store": False})
    assert strict.ask(asked, tokens=1)[0].cached == 0
    strict.close()

    lax = launch(tiny_llama, {"tiers": tiers, "fidelity": "int8"})
    found = lax.ask(asked, tokens=1)[0]
    assert found.cached == 688  # whole steps of its tail
    assert 0 < abs(found.logprobs[0] - exact.logprobs[0]) < 0.5  # eight bits, and no other numbers
    # What is computed behind it carries its lineage, so that nobody takes it for exact.
    lax.ask([*asked, *prompt(300, 1)], tokens=1)
    assert lax.cache.flush(30.0)
    lax.close()

    strict = launch(tiny_llama, {"tiers": tiers, "store": False, "fidelity": "exact"})
    assert strict.ask([*asked, *prompt(300, 1)], tokens=1)[0].cached == 0
    strict.close()
    assert list((tmp_path / "kv").rglob("*.int8*"))
