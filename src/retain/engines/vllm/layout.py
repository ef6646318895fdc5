"""How vLLM lays out KV: for each attention backend, where K and V lie in a page, as strides.

vLLM 0.32 gives every layer a logical view `[pages, heads, tokens, content]` whose strides express its
declared layout (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC: the order in memory of layer, page, head, token,
content). What the strides do not express is the content. Most backends put a token's K before its V; latent
attention
has one vector; the CPU backend ignores the view and keeps, per page and head, a plane of K transposed
`[dim, tokens]` and behind it a plane of V `[tokens, dim]`. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retain.errors import UnsupportedModel
from retain.model import DTYPES, LayerSpec

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

_K_BEFORE_V = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER"})
_LATENT = frozenset(
    {
        "CPU_MLA",
        "TRITON_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "CUTLASS_MLA",
    }
)
_PLANES = "CPU_ATTN"
_PLANE_ISAS = frozenset({"vec", "vec16"})
"""Kernels of the CPU backend whose pages were read back number by number; AMX packs K another way."""


@dataclass(frozen=True)
class Strides:
    """Where one of a layer's two planes lies: its first byte in the layer, and bytes from one to the next."""

    offset: int
    page: int
    head: int
    token: int
    dim: int


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer: its index in the model, vLLM's name and group, tensor, and two planes."""

    index: int
    name: str
    group: int
    cache: torch.Tensor
    pages: int
    page_tokens: int
    heads: int
    k_dim: int
    v_dim: int
    k: Strides
    v: Strides | None


@dataclass(frozen=True)
class Group:
    """One of vLLM's KV cache groups, with a table of blocks of its own: tokens a block, and its window."""

    block_tokens: int
    window: int | None


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups of a KV cache config. Raises UnsupportedModel naming the first layer of an unknown kind."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    found = []
    for group in kv_cache_config.kv_cache_groups:
        name = group.layer_names[0] if group.layer_names else "a layer"
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            for layer, each in spec.kv_cache_specs.items():
                _check_spec(layer, each)
            spec = spec.first_spec
        _check_spec(name, spec)
        if group.is_eagle_group:
            raise UnsupportedModel(
                f"the layer {name} belongs to a draft model, whose KV is not kept: its drafts behind a "
                "loaded prefix would be wrong more often. Use a drafter without KV (ngram), or none"
            )
        if group.host_resident or not group.enable_kv_transfer:
            raise UnsupportedModel(f"the KV of layer {name} is not kept where connectors reach it")
        window = getattr(spec, "sliding_window", None) if type(spec).__name__ == "SlidingWindowSpec" else None
        found.append(Group(int(spec.block_size), window))
    if not found:
        raise UnsupportedModel("this model has no KV cache, so there is nothing to keep")
    return tuple(found)


def _check_spec(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"):
        raise UnsupportedModel(f"the layer {name} keeps its state as {kind}, which is not supported")
    if getattr(spec, "non_causal", False):
        raise UnsupportedModel(f"the layer {name} attends to later tokens: its KV is not that of a prefix")
    if spec.kv_quant_mode.name != "NONE":
        raise UnsupportedModel(
            f"the layer {name} quantises its KV ({spec.kv_quant_mode.name}); its scales are not kept with it"
        )
    if spec.tokens_per_state != 1 or spec.state_content_bytes is not None or spec.num_head_slots is not None:
        raise UnsupportedModel(f"the layer {name} packs its KV in a way of its own, which is not supported")


def pages_of(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    backends: Mapping[str, tuple[str, str | None]],
    layers: Sequence[LayerSpec],
    index_of: Mapping[str, int],
    dtype: str,
) -> tuple[LayerPages, ...]:
    """The pages of every layer a worker holds, in the model's order.

    `backends` are, by layer, the attention backend's name and the kernel it picked. Raises UnsupportedModel
    naming the layer, the layout or the backend.
    """
    layout = kv_cache_config.kv_cache_layout
    if layout is not None and layout not in LAYOUTS:
        raise UnsupportedModel(f"the KV cache layout {layout} is not known; known are {', '.join(LAYOUTS)}")
    if kv_cache_config.has_mixed_precision_kv_cache:
        raise UnsupportedModel("layers with KV of different precision in one model are not supported")
    groups = groups_of(kv_cache_config)
    found = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            index = index_of[name]
            if index >= len(layers):
                raise UnsupportedModel(
                    f"the layer {name} is none of the model's {len(layers)}: a draft model's"
                )
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            backend, kernel = backends[name]
            found.append(
                _layer(
                    index,
                    name,
                    number,
                    groups[number],
                    kv_caches[name],
                    spec,
                    layers[index],
                    backend,
                    kernel,
                    dtype,
                )
            )
    found.sort(key=lambda each: each.index)
    numbers = [each.index for each in found]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise UnsupportedModel(f"a worker holds the layers {numbers}, which are not consecutive")
    return tuple(found)


def _layer(
    index: int,
    name: str,
    number: int,
    group: Group,
    cache: torch.Tensor,
    spec: Any,
    layer: LayerSpec,
    backend: str,
    kernel: str | None,
    dtype: str,
) -> LayerPages:
    item = DTYPES[dtype]
    if cache.dtype != getattr(torch, dtype) or cache.dim() != 4:
        raise UnsupportedModel(
            f"the cache of layer {name} is {tuple(cache.shape)} of {cache.dtype}, not {dtype}"
        )
    pages, heads, tokens, content = cache.shape
    k_dim, v_dim = layer.k_dim, layer.v_dim
    if content != k_dim + v_dim or spec.head_size != k_dim:
        raise UnsupportedModel(
            f"a token of layer {name} takes {content} numbers a head, where {k_dim} + {v_dim} were expected"
        )
    if group.block_tokens % tokens:
        raise UnsupportedModel(f"layer {name} has pages of {tokens} tokens in blocks of {group.block_tokens}")
    page, head, token, dim = (stride * item for stride in cache.stride())
    if backend == _PLANES:
        if kernel not in _PLANE_ISAS:
            raise UnsupportedModel(
                f"how the kernel {kernel!r} of vLLM's CPU attention lays out KV is not known; known are "
                f"{', '.join(sorted(_PLANE_ISAS))}"
            )
        if (head, token, dim) != (tokens * content * item, content * item, item):
            raise UnsupportedModel(f"the pages of layer {name} are not those of the layout LBHNC")
        plane = tokens * k_dim * item
        k = Strides(0, page, head, item, tokens * item)
        v: Strides | None = Strides(plane, page, head, v_dim * item, item)
    elif backend in _LATENT and layer.kind == "latent":
        k, v = Strides(0, page, head, token, dim), None
    elif backend in _K_BEFORE_V and layer.kind != "latent":
        k = Strides(0, page, head, token, dim)
        v = Strides(k_dim * dim, page, head, token, dim)
    else:
        raise UnsupportedModel(
            f"how vLLM's attention backend {backend} lays out the KV of layer {name} ({layer.kind}) is not "
            f"known; known are {', '.join(sorted(_K_BEFORE_V | _LATENT | {_PLANES}))}"
        )
    return LayerPages(index, name, number, cache, pages, tokens, heads, k_dim, v_dim, k, v)
