"""Profiles of small models with random bases, and blocks with numbers like a model's, for tests."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from retain.block import Block, array_shapes, block_of, make_header
from retain.codecs.base import container
from retain.codecs.ladder.learn import learn_tables
from retain.codecs.ladder.profile import Part, Profile, Segment
from retain.codecs.ladder.transform import components, from_floats, place_of
from retain.header import BlockHeader
from retain.model import LayerSpec, ModelSpec, RopeSpec, layer_groups

LLAMA3 = RopeSpec(
    5e5,
    16,
    "llama3",
    (
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 64.0),
    ),
)
YARN = RopeSpec(1e4, 16, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 64.0)))


def spec_of(layers: tuple[LayerSpec, ...], dtype: str = "float32", name: str = "odd") -> ModelSpec:
    return ModelSpec(name, "test", layers, dtype, name.encode().ljust(32, b"."), b"v" * 32)


GEOMETRIES: dict[str, tuple[LayerSpec, ...]] = {
    "gqa": (LayerSpec("full", 2, 16, 16, None, RopeSpec(1e5, 16)),) * 3,
    "mqa, heads of 80": (LayerSpec("full", 1, 80, 80, None, RopeSpec(1e4, 80)),) * 2,
    "partial rotary": (LayerSpec("full", 2, 16, 16, None, RopeSpec(1e4, 4)),) * 2,
    "one layer": (LayerSpec("full", 2, 8, 8, None, RopeSpec(1e4, 8)),),
    "28 layers": (LayerSpec("full", 1, 4, 4, None, RopeSpec(1e4, 4)),) * 28,
    "sliding, with a base of its own": (
        LayerSpec("sliding", 1, 32, 32, 64, RopeSpec(1e4, 32)),
        LayerSpec("full", 1, 32, 32, None, RopeSpec(1e6, 32)),
    ),
    "no rotation": (LayerSpec("full", 2, 8, 8),) * 2,
    "K and V of two sizes": (LayerSpec("full", 2, 16, 8, None, RopeSpec(1e4, 16)),) * 2,
    "layers of two shapes": (
        LayerSpec("full", 2, 16, 16, None, LLAMA3),
        LayerSpec("sliding", 4, 8, 8, 32, RopeSpec(1e4, 8, "linear", (("factor", 2.0),))),
        LayerSpec("full", 2, 16, 16, None, YARN),
    ),
    "interleaved pairs": (
        LayerSpec("full", 2, 8, 8, None, RopeSpec(1e4, 8, "none", (("pairs", "interleaved"),))),
    ),
}


def kv_like(header: BlockHeader, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers with means, channels of unlike size and loud tokens, as a block's arrays."""
    random = np.random.default_rng(seed)
    model = np.random.default_rng(1)
    arrays = {}
    for name, shape in array_shapes(header).items():
        layers, heads, tokens, dim = shape
        sizes = model.exponential(1.0, (layers, heads, 1, dim)) + 0.05
        means = model.standard_normal((layers, heads, 1, dim)) * 2
        loud = np.exp(random.standard_normal((1, 1, tokens, 1)) / 2)
        numbers = (random.standard_normal(shape) * sizes * loud + means).astype(np.float32)
        arrays[name] = np.empty(shape, container(header.dtype))
        from_floats(numbers, header.dtype, arrays[name])
    return arrays


def block_like(
    spec: ModelSpec, count: int, first: int = 0, seed: int = 0, arrays: dict[str, np.ndarray] | None = None
) -> Block:
    tokens = np.random.default_rng(seed).integers(0, 50, count).astype(np.uint32)
    header = make_header(spec, space=b"s" * 32, parent=b"p" * 32, tokens=tokens, first=first)
    return block_of(header, tokens, arrays or kv_like(header, seed))


def parts_of(spec: ModelSpec, joint: bool) -> tuple[Part, ...]:
    random = np.random.default_rng(2)
    groups = layer_groups(spec.layers)
    parts = []
    for group in groups:
        suffix = "" if len(groups) == 1 else f".{group.index}"
        size = 2
        for start in range(0, len(group.layers), size):
            stop = min(start + size, len(group.layers))
            sides = [("k", group.k_dim)] + ([("v", group.v_dim)] if group.v_dim else [])
            for chosen in [sides] if joint else [[side] for side in sides]:
                segments = tuple(Segment(f"{side}{suffix}", start, stop) for side, _ in chosen)
                width = sum((stop - start) * group.heads * dim for _, dim in chosen)
                turn, _ = np.linalg.qr(random.standard_normal((width, width)))
                probe = random.standard_normal((stop - start, group.heads, group.k_dim + 3)) / 8
                parts.append(
                    Part(
                        segments,
                        random.standard_normal(width).astype(np.float32),
                        np.exp(random.standard_normal(width) / 2).astype(np.float32),
                        np.ascontiguousarray(turn).astype(np.float16),
                        np.zeros(width, np.uint8),
                        probe=probe.astype(np.float32),
                    )
                )
    return tuple(parts)


@lru_cache(maxsize=32)
def profile_like(spec: ModelSpec, joint: bool = True, sinks: int = 4, step: float = 0.02) -> Profile:
    """A profile of the model, its tables learnt from a few blocks."""
    profile = Profile(spec.kin, spec.name, spec.layers, sinks, step, parts_of(spec, joint))
    ids = np.arange(0, 50, 3, dtype=np.uint32)
    known = profile.parts[0]
    predicted = np.random.default_rng(3).standard_normal((ids.size, min(5, known.width))).astype(np.float16)
    profile = replace(profile, token_ids=ids, parts=(replace(known, predicted=predicted), *profile.parts[1:]))
    blocks = [block_like(spec, 64, 64 * i, seed=100 + i) for i in range(4)]
    return learn_tables(profile, [(b.arrays, b.tokens, b.header.first) for b in blocks], spec.dtype)


def weighted_error(profile: Profile, before: Block, after: Block) -> float:
    """The largest error of a component, in the steps of `fine` of its token's class 0."""
    place = place_of(profile, before.header.dtype, before.header.first, before.header.count)
    return (
        max(
            float(
                np.abs(
                    components(profile, part, before.arrays, place)
                    - components(profile, part, after.arrays, place)
                ).max()
            )
            for part in profile.parts
        )
        / profile.step
    )


__all__ = ["GEOMETRIES", "block_like", "kv_like", "profile_like", "spec_of", "weighted_error"]
