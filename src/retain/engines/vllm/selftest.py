"""The self-test at start: what vLLM's own kernels write into pages must come out of them as it went in.

For every layer a pattern is written by the engine's kernel over the border of two blocks, read back through
Retain's copies, written by these into other blocks, and the bytes of all four compared. A layout that was
misjudged, or that a later vLLM changes, is refused here, before it can give a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from retain.codecs.base import Array, container
from retain.errors import UnsupportedModel
from retain.model import LayerSpec

from .layout import Group, LayerPages
from .pages import PagedKV, planes
from .tables import Table

_AHEAD = (
    3  # tokens of the first block, and of the last, that are left out: so that offsets are seen to be right
)


def run(
    paged: PagedKV,
    held: Sequence[LayerPages],
    groups: Sequence[Group],
    layers: tuple[LayerSpec, ...],
    dtype: str,
    attention: Mapping[str, Any],
) -> None:
    """Raise UnsupportedModel unless every layer's pages are read and written as the engine does.

    The cache must hold nothing yet: blocks 1 to 4 are used, and are zero afterwards. `attention` are vLLM's
    layers by name. With fewer than five blocks, fewer are used.
    """
    blocks = min(held[0].pages * held[0].page_tokens // groups[held[0].group].block_tokens, 5)
    if blocks < 3:
        raise UnsupportedModel(
            "vLLM's KV cache has fewer than 3 blocks: it is too small to be tested and used"
        )
    span = (blocks - 1) // 2
    for number, group in enumerate(groups):
        members = [layer for layer in held if layer.group == number]
        if members:
            _group(paged, members, held, number, group, groups, layers, dtype, attention, span)


def _group(
    paged: PagedKV,
    members: Sequence[LayerPages],
    held: Sequence[LayerPages],
    number: int,
    group: Group,
    groups: Sequence[Group],
    layers: tuple[LayerSpec, ...],
    dtype: str,
    attention: Mapping[str, Any],
    span: int,
) -> None:
    count = span * group.block_tokens - 2 * _AHEAD
    source = list(range(1, 1 + span))
    target = list(range(1 + span, 1 + 2 * span))
    # Groups may share their bytes, so only one is looked at; the others are given no blocks to write, and
    # what is read for them is not compared.
    tables = [_tables(group, each, source, number == index) for index, each in enumerate(groups)]
    written = {
        layer.index: _write(layer, attention[layer.name], group, count, source[0]) for layer in members
    }
    arrays = _arrays(held, layers, dtype, count)
    paged.gather(arrays, tables, _AHEAD, 0, count)
    _synchronise(members)
    for layer in members:
        for name, row in _rows(layer, held, layers):
            got = torch.from_numpy(np.ascontiguousarray(arrays[name][row]).view(np.uint8))
            expected = written[layer.index][name[0]].transpose(0, 1).contiguous().cpu().view(torch.uint8)
            if not torch.equal(got, expected.reshape(got.shape)):
                raise UnsupportedModel(
                    f"vLLM's layer {layer.name} lays out {name[0].upper()} otherwise than expected: what its "
                    "kernel wrote was not read back. This version or processor is not supported"
                )
    tables = [_tables(group, each, target, number == index) for index, each in enumerate(groups)]
    paged.scatter(arrays, tables, _AHEAD, 0, count)
    _synchronise(members)
    for layer in members:
        split = group.block_tokens // layer.page_tokens
        one, other = (
            layer.cache[blocks[0] * split : (blocks[-1] + 1) * split] for blocks in (source, target)
        )
        if not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
            raise UnsupportedModel(
                f"what was written into pages of vLLM's layer {layer.name} is not what its kernel writes"
            )
    for layer in members:
        split = group.block_tokens // layer.page_tokens
        layer.cache[source[0] * split : (target[-1] + 1) * split].zero_()


def _tables(group: Group, each: Group, blocks: list[int], chosen: bool) -> Table:
    if chosen:
        return Table(0, each.block_tokens, np.array(blocks, np.int64))
    need = -(-len(blocks) * group.block_tokens // each.block_tokens)
    return Table(0, each.block_tokens, np.zeros(need, np.int64))


def _write(layer: LayerPages, module: Any, group: Group, count: int, block: int) -> dict[str, torch.Tensor]:
    """Have the engine's kernel write a pattern of `count` tokens; returns it, `[tokens, heads, dim]`."""
    cache = layer.cache
    random = torch.Generator().manual_seed(layer.index)

    def pattern(dim: int) -> torch.Tensor:
        # Whole numbers below 128: exact in every float, and too many in a row to agree by chance.
        numbers = torch.randint(-127, 128, (count, layer.heads, dim), generator=random)
        return numbers.to(cache.dtype).to(cache.device)

    slots = torch.arange(count, device=cache.device, dtype=torch.int64) + block * group.block_tokens + _AHEAD
    k = pattern(layer.k_dim)
    if layer.v is None:
        rank = int(module.kv_lora_rank)
        one = torch.ones((), dtype=torch.float32, device=cache.device)
        latent, rotated = k[:, 0, :rank].contiguous(), k[:, :, rank:].contiguous()
        module.impl.do_kv_cache_update(latent, rotated, module.kv_cache, slots, "auto", one)
        return {"k": k}
    v = pattern(layer.v_dim)
    module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)
    return {"k": k, "v": v}


def _arrays(
    held: Sequence[LayerPages], layers: tuple[LayerSpec, ...], dtype: str, count: int
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for plane in planes(held, layers):
        rows = max(plane.rows) + 1
        before = arrays.get(plane.array)
        rows = rows if before is None else max(rows, before.shape[0])
        arrays[plane.array] = np.zeros((rows, plane.layers[0].heads, count, plane.dim), container(dtype))
    return arrays


def _rows(
    layer: LayerPages, held: Sequence[LayerPages], layers: tuple[LayerSpec, ...]
) -> list[tuple[str, int]]:
    return [
        (plane.array, row)
        for plane in planes(held, layers)
        for row, member in zip(plane.rows, plane.layers, strict=True)
        if member is layer
    ]


def _synchronise(members: Sequence[LayerPages]) -> None:
    if members[0].cache.device.type == "cuda":
        torch.cuda.synchronize(members[0].cache.device)
