"""Small model specs and blocks with random numbers, for tests."""

from __future__ import annotations

import numpy as np

from retain.block import Block, array_shapes, block_of, make_header
from retain.codecs.base import container
from retain.identity import Chain, chain, space_of
from retain.model import LayerSpec, ModelSpec, RopeSpec, Slice

ROPE = RopeSpec(1e5, 8)


def small_spec(
    dtype: str = "float32", layers: int = 2, heads: int = 2, dim: int = 8, variant: bytes = b"v" * 32
) -> ModelSpec:
    return ModelSpec(
        "small",
        "llama",
        (LayerSpec("full", heads, dim, dim, None, ROPE),) * layers,
        dtype,
        b"k" * 32,
        variant,
    )


def mixed_spec(dtype: str = "float32") -> ModelSpec:
    """Two shapes and three kinds of layers."""
    layers = (
        LayerSpec("full", 4, 8, 8, None, ROPE),
        LayerSpec("sliding", 2, 16, 16, 32, RopeSpec(1e4, 16, "linear", (("factor", 8.0),))),
        LayerSpec("full", 4, 8, 8, None, ROPE),
        LayerSpec("latent", 1, 24, 0),
    )
    return ModelSpec("mixed", "mixed", layers, dtype, b"k" * 32, b"v" * 32)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(container(dtype))


def block_at(
    spec: ModelSpec,
    tokens_chain: Chain,
    index: int = 0,
    *,
    count: int | None = None,
    slice: Slice | None = None,
    seed: int | None = None,
) -> Block:
    """A block of `tokens_chain` with random numbers; equal arguments give equal numbers."""
    tokens = tokens_chain.block(index)[:count]
    header = make_header(
        spec,
        space=tokens_chain.space,
        parent=tokens_chain.parent(index),
        tokens=tokens,
        first=index * tokens_chain.block_tokens,
        slice=slice,
        media=tokens_chain.media,
        producer="tests",
    )
    base = int.from_bytes(header.key[:4], "little") if seed is None else seed
    arrays = {
        name: numbers(shape, spec.dtype, base + i)
        for i, (name, shape) in enumerate(array_shapes(header).items())
    }
    return block_of(header, tokens, arrays)


def chain_of(tokens, block_tokens: int = 16, salt: bytes | None = None) -> Chain:
    return chain(space_of(b"k" * 32, None, salt), tokens, block_tokens)
