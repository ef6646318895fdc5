"""Measuring: what each of a profile's levels costs in bits, and in what the model says next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from retain.codecs.base import Array
from retain.codecs.ladder.coder import decode, encode
from retain.codecs.ladder.levels import LEVELS, depth
from retain.codecs.ladder.profile import Profile
from retain.identity import BLOCK_TOKENS
from retain.model import LayerSpec, layer_groups
from retain.profile.gather import Sample

KV = Sequence[tuple[Array, Array]]
"""K and V of every layer, `[heads, tokens, head_dim]`, K with RoPE applied."""


class Effect(Protocol):
    """What changed KV does to the tokens that follow."""

    @property
    def mean(self) -> float:
        """The mean KL, in nats."""


class Judge(Protocol):
    """What remembers how a model goes on after a context."""

    def effect(self, kv: KV) -> Effect:
        """What other KV of the context does to that."""


def measure(
    profile: Profile, judges: Sequence[tuple[Sample, Judge]], tell: Callable[[str, int], None]
) -> dict[str, tuple[float, float]]:
    """Each level's mean KL and bits a value on these contexts; streams alone are counted, not headers."""
    kl: dict[str, list[float]] = {level: [] for level in LEVELS}
    bits: dict[str, list[float]] = {level: [] for level in LEVELS}
    for sample, judge in judges:
        tell("measuring levels", 0)
        blocks = list(_blocks(sample))
        streams = [
            encode(profile, each.arrays, each.tokens, LEVELS[-1], dtype="float32", first=each.first)
            for each in blocks
        ]
        values = sum(array.size for array in sample.arrays.values())
        for level in LEVELS:
            words = ("sinks", *LEVELS[: depth(level) + 1])
            size = sum(
                data.nbytes
                for each in streams
                for name, data in each.items()
                if name.partition(".")[0] in words
            )
            bits[level].append(8 * size / values)
            kl[level].append(judge.effect(_decoded(profile, blocks, streams, level)).mean)
        tell("measuring levels", 1)
    return {level: (float(np.mean(kl[level])), float(np.mean(bits[level]))) for level in LEVELS}


def _blocks(sample: Sample) -> Iterator[Sample]:
    for first in range(0, len(sample.tokens), BLOCK_TOKENS):
        span = slice(first, first + BLOCK_TOKENS)
        arrays = {name: array[:, :, span] for name, array in sample.arrays.items()}
        yield Sample(arrays, sample.tokens[span], sample.first + first)


def _decoded(
    profile: Profile, blocks: Sequence[Sample], streams: Sequence[Mapping[str, Array]], level: str
) -> KV:
    found = []
    for each, held in zip(blocks, streams, strict=True):
        out = {name: np.empty(array.shape, np.float32) for name, array in each.arrays.items()}
        decode(profile, held, each.tokens, level, out, dtype="float32", first=each.first)
        found.append(out)
    whole = {name: np.concatenate([each[name] for each in found], axis=2) for name in found[0]}
    return layers_of(profile.layers, whole)


def layers_of(layers: tuple[LayerSpec, ...], arrays: Mapping[str, Array]) -> KV:
    """The arrays of a block as K and V of every layer."""
    groups = layer_groups(layers)
    found: dict[int, tuple[Array, Array]] = {}
    for each in groups:
        suffix = "" if len(groups) == 1 else f".{each.index}"
        for row, layer in enumerate(each.layers):
            found[layer] = (arrays[f"k{suffix}"][row], arrays[f"v{suffix}"][row])
    return [found[layer] for layer in range(len(layers))]
