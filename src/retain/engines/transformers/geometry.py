"""Geometry: a block's arrays and a model's cache layers, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from retain.block import Block
from retain.codecs.base import Array
from retain.errors import UnsupportedModel
from retain.identity import BLOCK_TOKENS
from retain.model import ModelSpec

from .layers import BufferPool, KeptLayer, Rows, as_array, layers_of

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_PARALLEL_BYTES = 8 << 20
"""Below this a restore is not worth waking other threads."""


@dataclass(frozen=True)
class Place:
    """Where one layer's numbers lie in a block: the names of its arrays and the row in them."""

    k: str
    v: str
    row: int


Views = list[tuple[Tensor, Tensor]]
"""K and V of every layer, each `[1, heads, tokens, head_dim]`."""


class Geometry:
    """The layers of one model spec, in blocks and in a transformers cache."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.places: list[Place] = [Place("", "", 0)] * len(spec.layers)
        groups = spec.groups
        for group in groups:
            suffix = "" if len(groups) == 1 else f".{group.index}"
            for row, layer in enumerate(group.layers):
                self.places[layer] = Place(f"k{suffix}", f"v{suffix}", row)

    def check(self, cache: Cache) -> None:
        """Compare the spec with a cache that the model has just filled. Raises UnsupportedModel, naming what
        differs."""
        layers = layers_of(cache)
        if len(layers) != len(self.spec.layers):
            raise UnsupportedModel(
                f"the model keeps KV in {len(layers)} layers, its spec names {len(self.spec.layers)}"
            )
        for index, (layer, wanted) in enumerate(zip(layers, self.spec.layers, strict=True)):
            # A latent layer lies in a plain cache layer: the latent as K, the rotated part as V.
            known = wanted.kind in ("full", "sliding", "latent")
            if not known or (layer.window is None) != (wanted.kind != "sliding"):
                kind = "full" if layer.window is None else "sliding"
                raise UnsupportedModel(
                    f"layer {index} is {wanted.kind} by the model's spec, but its cache is {kind}"
                )
            if layer.window != wanted.window:
                raise UnsupportedModel(
                    f"layer {index} has a window of {wanted.window} by the spec and of {layer.window} "
                    "in the cache"
                )
            if layer.rows is None:
                raise UnsupportedModel(
                    f"layer {index} shares another layer's KV, which Retain does not know to keep"
                )
            found = (layer.rows.k.shape[1], layer.rows.k.shape[3], layer.rows.v.shape[3])
            if found != wanted.shape or layer.rows.v.shape[1] != wanted.heads:
                raise UnsupportedModel(
                    f"layer {index} has (heads, K size, V size) {found} in the cache and {wanted.shape} in "
                    "the model's spec"
                )
            if layer.rows.k.dtype != TORCH_DTYPES[self.spec.dtype]:
                raise UnsupportedModel(
                    f"layer {index} keeps {layer.rows.k.dtype}, the spec says {self.spec.dtype}"
                )

    def restore(
        self,
        cache: Cache,
        blocks: Sequence[Block],
        lengths: Sequence[int],
        *,
        room: int,
        pool: BufferPool,
        device: torch.device,
        workers: ThreadPoolExecutor | None,
    ) -> None:
        """Fill an empty cache from blocks, one copy a layer and block; their memory is not referred to
        afterwards."""
        tokens = sum(lengths)
        dtype = TORCH_DTYPES[self.spec.dtype]
        work = []
        filled: list[tuple[KeptLayer, Rows]] = []
        cpu = torch.device("cpu")
        for layer, spec in zip(layers_of(cache), self.spec.layers, strict=True):
            origin = first_restored(tokens, layer.window)
            like = [torch.empty((1, spec.heads, 0, size), dtype=dtype) for size in (spec.k_dim, spec.v_dim)]
            rows = Rows(pool, like[0], like[1], origin, tokens - origin + room)
            work.append((rows, self.places[layer.index]))
            filled.append((layer, rows))
        if workers is not None and tokens * self.spec.token_bytes > _PARALLEL_BYTES:
            list(workers.map(lambda item: _fill(item[0], item[1], blocks, lengths), work))
        else:
            for rows, place in work:
                _fill(rows, place, blocks, lengths)
        for layer, rows in filled:
            rows.stop = tokens
            layer.start(rows if device == cpu else rows.moved_to(device))

    def views(self, cache: Cache, first: int, last: int) -> Views:
        """K and V of positions first .. last - 1 of every layer. Raises IndexError where a layer no longer
        holds them."""
        found = []
        for layer in layers_of(cache):
            if layer.rows is None:
                raise IndexError(f"layer {layer.index} holds nothing")
            found.append(layer.rows.view(first, last))
        return found

    def copy_out(self, views: Views, arrays: Mapping[str, Array]) -> None:
        """Write the views into a block's arrays, `[layers, heads, tokens, head_dim]`."""
        for place, (k, v) in zip(self.places, views, strict=True):
            np.copyto(arrays[place.k][place.row], as_array(k[0].cpu()))
            np.copyto(arrays[place.v][place.row], as_array(v[0].cpu()))


def first_restored(tokens: int, window: int | None) -> int:
    """The first position a layer needs when `tokens` are restored: a sliding layer its window, and, for
    storing, the block that is not yet complete."""
    if window is None:
        return 0
    return max(0, min(tokens - window + 1, tokens // BLOCK_TOKENS * BLOCK_TOKENS))


def _fill(rows: Rows, place: Place, blocks: Sequence[Block], lengths: Sequence[int]) -> None:
    k, v = as_array(rows.k[0]), as_array(rows.v[0])
    at = 0
    for block, length in zip(blocks, lengths, strict=True):
        skip = min(length, max(0, rows.origin - at))
        if skip < length:
            span = slice(at + skip - rows.origin, at + length - rows.origin)
            np.copyto(k[:, span], block.arrays[place.k][place.row][:, skip:length])
            np.copyto(v[:, span], block.arrays[place.v][place.row][:, skip:length])
        at += length


def stable_tokens(config: Any) -> int | None:
    """How many tokens a prompt may have for its KV to depend on what precedes alone; None: any number.

    Dynamic and long RoPE turn keys by frequencies that change once the sequence passes the original context,
    so that KV from a shorter prompt is not what the model would compute in a longer one.
    """
    rules = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for rule in _rules(rules):
        kind = str(rule.get("rope_type", rule.get("type", "default")))
        longest = getattr(config, "max_position_embeddings", None)
        original = rule.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if "dynamic" in kind:
            limits.append(int(min(x for x in (original, longest) if x)) - 1)
        elif kind == "longrope":
            limits.append(int(original or longest or 1))
    return min(limits, default=None)


def _rules(rules: Any) -> Iterable[Mapping[str, Any]]:
    if any(isinstance(value, Mapping) for value in rules.values()):
        return [value for value in rules.values() if isinstance(value, Mapping)]
    return [rules]
