"""A context's KV through stored objects: written block by block with one of Retain's codecs, and read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from retain.bench.codec_rivals import Coded, Layers, bfloat16_bits, from_bits
from retain.block import Block, array_shapes, decode, group_rows, make_header
from retain.codecs import codec
from retain.codecs.base import Array
from retain.header import BlockHeader
from retain.identity import Chain, Tokens, chain, space_of
from retain.model import ModelSpec, layer_groups

LEVELS = ("tiny", "balanced", "near", "fine")


def through_objects(spec: ModelSpec, tokens: Tokens, layers: Layers, word: str) -> Coded:
    """The KV of a context's first tokens written as objects of codec `word` and read again.

    Every byte of the objects is counted, headers too. What is left of the tokens behind the last whole block
    makes a shorter one.
    """
    count = layers[0][0].shape[1]
    keys = chain(space_of(spec.kin, spec.adapter, None), tokens[:count])
    parts: list[Block] = []
    size, encoding, decoding = 0, 0.0, 0.0
    for first in range(0, count, keys.block_tokens):
        block = _block(spec, keys, layers, first)
        started = time.perf_counter()
        data = b"".join(bytes(part) for part in block.encode(codec(word)))
        between = time.perf_counter()
        parts.append(decode(memoryview(data)))
        decoding += time.perf_counter() - between
        encoding += between - started
        size += len(data)
    found = [
        tuple(
            np.concatenate([_plain(_side(part, layer, side), spec.dtype) for part in parts], 1)
            for side in (0, 1)
        )
        for layer in range(len(spec.layers))
    ]
    return Coded([(k, v) for k, v in found], 8.0 * size, encoding, decoding)


def lossless(spec: ModelSpec, tokens: Tokens, layers: Layers) -> Coded:
    """The KV rounded to bfloat16, written losslessly."""
    return through_objects(replace(spec, dtype="bfloat16"), tokens, layers, "lossless")


def _block(spec: ModelSpec, keys: Chain, layers: Layers, first: int) -> Block:
    index = first // keys.block_tokens
    held = keys.block(index)
    header = make_header(spec, space=keys.space, parent=keys.parent(index), tokens=held, first=first)
    return Block(header, held, _arrays(header, layers, slice(first, first + len(held))))


def _arrays(header: BlockHeader, layers: Layers, span: slice) -> dict[str, Array]:
    stored: Callable[[Array], Array] = bfloat16_bits if header.dtype == "bfloat16" else np.ascontiguousarray
    single = len(layer_groups(header.layers)) == 1
    arrays: dict[str, Array] = {}
    for group, rows in group_rows(header):
        for side, letter in enumerate("kv"):
            name = letter if single else f"{letter}.{group.index}"
            arrays[name] = stored(np.stack([layers[row][side][:, span] for row in rows]))
    return {name: arrays[name] for name in array_shapes(header)}


def _side(block: Block, layer: int, side: int) -> Array:
    found = block.layer(layer)[side]
    if found is None:
        raise ValueError(f"layer {layer} has no values")
    return found


def _plain(array: Array, dtype: str) -> Array:
    return from_bits(array) if dtype == "bfloat16" else array
