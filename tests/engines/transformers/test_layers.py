"""The layers that keep their rows behave, step by step, as transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from retain.engines.transformers.layers import BufferPool, KeptLayer, KeptSlidingLayer, kept_cache, rows_of
from tests.engines.transformers.tiny import gemma3, llama, prompt

pytestmark = pytest.mark.engine

CHUNKS = (1, 1, 7, 40, 1, 300, 1, 1, 500, 1, 33, 1)


def states(count: int, seed: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 2, count, 4, generator=generator),
        torch.randn(batch, 2, count, 6, generator=generator),
    )


def pair(window: int | None) -> tuple[Any, Any]:
    pool = BufferPool()
    if window is None:
        return KeptLayer(0, pool), DynamicLayer()  # type: ignore[no-untyped-call]
    return KeptSlidingLayer(0, window, pool), DynamicSlidingWindowLayer(window)


def agree(mine: Any, native: Any) -> None:
    assert torch.equal(mine.keys, native.keys)
    assert torch.equal(mine.values, native.values)
    assert mine.get_seq_length() == native.get_seq_length()
    assert mine.get_mask_sizes(3) == native.get_mask_sizes(3)


@pytest.mark.parametrize("window", [None, 2, 16, 33, 1000])
@pytest.mark.parametrize("record", [False, True])
def test_every_update_shows_what_the_native_layer_shows(window: int | None, record: bool) -> None:
    mine, native = pair(window)
    if record and window is not None:
        mine.activate_past_recording()
        native.activate_past_recording()
    for seed, count in enumerate(CHUNKS):
        k, v = states(count, seed)
        for a, b in zip(mine.update(k, v), native.update(k, v), strict=True):
            assert torch.equal(a, b)
        agree(mine, native)


@pytest.mark.parametrize("window", [None, 16])
def test_rows_once_written_stay_whatever_is_done_to_the_cache(window: int | None) -> None:
    mine, native = pair(window)
    for layer in (mine, native):
        if window is not None:
            layer.activate_past_recording()
        layer.update(*states(50, 0))
    rows = mine.rows
    before = rows.k.clone(), rows.stop
    changes: list[Any] = [
        lambda layer: layer.crop(-7),
        lambda layer: layer.batch_repeat_interleave(3),
        lambda layer: layer.reorder_cache(torch.tensor([2, 1, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([0])),
        lambda layer: layer.reset(),
    ]
    for seed, change in enumerate(changes):
        for layer in (mine, native):
            change(layer)
            batch = 1 if layer.keys is None else layer.keys.shape[0]
            layer.update(*states(5, seed, batch))
        agree(mine, native)
    assert torch.equal(rows.k[:, :, :50], before[0][:, :, :50])
    assert rows.stop == before[1]


def test_a_sliding_layer_lets_go_of_rows_that_are_stored_and_outside_its_window() -> None:
    mine, native = pair(32)
    for seed in range(2000):
        k, v = states(1, seed)
        mine.hold = seed // 256 * 256
        mine.update(k, v)
        native.update(k, v)
        assert mine.rows.origin <= mine.hold
    agree(mine, native)
    assert mine.rows.capacity <= 1024


def test_a_copied_cache_goes_its_own_way() -> None:
    model = llama()
    mine = kept_cache((None, None, None), BufferPool(), 8)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt(30)]), cache=mine)
        other = copy.deepcopy(mine)
        model(input_ids=torch.tensor([prompt(5, 1)]), cache=mine)
        kept = rows_of(mine)[0].k[:, :, :35].clone()
        model(input_ids=torch.tensor([prompt(5, 2)]), cache=other)
    assert torch.equal(rows_of(mine)[0].k[:, :, :35], kept)
    assert other.get_seq_length() == 35


@pytest.mark.parametrize("make", [llama, gemma3])
def test_logits_are_bit_equal_to_those_over_a_dynamic_cache(make: Any) -> None:
    model = make()
    windows = tuple(
        getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers
    )
    mine, native = kept_cache(windows, BufferPool(), 8), DynamicCache(config=model.config)
    with torch.no_grad():
        for seed, count in enumerate((40, 1, 1, 20, 1)):
            ids = torch.tensor([prompt(count, seed)])
            assert torch.equal(
                model(input_ids=ids, cache=mine).logits, model(input_ids=ids, cache=native).logits
            )


def test_training_through_the_layers_still_gives_gradients() -> None:
    model = llama()
    mine = kept_cache((None, None, None), BufferPool(), 8)
    model(input_ids=torch.tensor([prompt(10)]), cache=mine).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_the_pool_holds_no_more_than_the_largest_request() -> None:
    pool = BufferPool()
    device = torch.device("cpu")
    largest = [pool.take(1000, device) for _ in range(4)]
    pool.give(largest)
    assert pool.held_bytes == 4000
    pool.give([torch.empty(900, dtype=torch.uint8) for _ in range(3)])
    assert pool.held_bytes <= 4000
    assert pool.take(950, device).data_ptr() in {buffer.data_ptr() for buffer in largest}
    assert pool.take(50_000_000, device).numel() == 50_000_000
