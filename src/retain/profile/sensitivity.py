"""Sensitivity: what an error in the KV costs, by gradients or by trying, and which tokens it costs most at.

KL of the next tokens is half the Fisher information times the squared error. Its mean over a layer's K or V
gives the layer's weight; how it differs from token to token is predicted from the keys alone, so that a
decoder needs no gradients. Only a token's mean over a part matters, so one number a token and part is coded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retain.codecs.base import Array
from retain.codecs.ladder.profile import Floats
from retain.codecs.ladder.rope import Rotation
from retain.errors import UnsupportedModel
from retain.model import LayerSpec
from retain.profile.gather import SINKS, Plan
from retain.profile.measure import KV, Judge

LOUD = 100.0
"""Squared gradients of a token, in units of the median one, from which it is kept as it is at a sequence's
start: in SmolLM2 the first has 80,000 times as much and more, those behind it have nothing special."""

RIDGE = 10.0
LEAST = 1e-6
NOISE = 0.15
"""Noise put into a layer, relative to its own spread: small enough for KL to grow with its square."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Token importance of a part: `weights` float32 `[rows, heads, k_dim + 3]`, and the mean of what it
    gives."""

    weights: Floats
    center: float


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What errors cost: `weights[layer]` for K and V, a probe a part (none where there are no gradients), and
    how many tokens at a sequence's start cost so much that they are to be kept as they are."""

    weights: tuple[tuple[float, float], ...]
    probes: tuple[Probe | None, ...]
    sinks: int = SINKS


class Gradients:
    """Squared gradients of some texts, and what probes are fitted to."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        self._layers = layers
        self._squares: list[list[tuple[Array, Array]]] = []
        self._features: list[list[Array]] = []
        self._openings: list[Array] = []

    def add(self, kv: KV, gradients: KV) -> None:
        """The KV of a context and the gradients of what follows, equally shaped."""
        squares, features = [], []
        energy = np.zeros(kv[0][0].shape[1])
        for spec, (k, v), (gk, gv) in zip(self._layers, kv, gradients, strict=True):
            free = Rotation([spec]).remove(np.asarray(k, np.float32)[None], 0)[0]
            features.append(features_of(free, v)[:, SINKS:])
            squares.append(((gk[:, SINKS:] ** 2).mean(-1), (gv[:, SINKS:] ** 2).mean(-1)))
            energy += (gk**2).sum(axis=(0, 2)) + (gv**2).sum(axis=(0, 2))
        self._openings.append(energy[:SINKS] / max(float(np.median(energy[SINKS:])), 1e-30))
        self._squares.append(squares)
        self._features.append(features)

    def sensitivity(self, plans: Sequence[Plan]) -> Sensitivity:
        """Weights and probes from all that was added. Raises UnsupportedModel where nothing was felt."""
        means = []
        for layer in range(len(self._layers)):
            k, v = (float(np.mean([text[layer][side].mean() for text in self._squares])) for side in (0, 1))
            means.append((k, v))
        weights = _roots(means)
        loud = np.flatnonzero(np.median(self._openings, axis=0) > LOUD)
        sinks = 1 + int(loud.max(initial=0))
        return Sensitivity(weights, tuple(self._probe(each, weights) for each in plans), sinks)

    def _probe(self, part: Plan, weights: Sequence[tuple[float, float]]) -> Probe:
        rows, given = [], []
        for layer in part.layers:
            features = np.concatenate([text[layer] for text in self._features], 1)
            # In units of each side's mean, as errors are: a token's step is one for K and V together.
            squares = np.sum(
                [
                    np.concatenate([text[layer][side] for text in self._squares], 1)
                    / weights[layer][side] ** 2
                    for side in (0, 1)
                ],
                axis=0,
            )
            wanted = np.log2(squares + LEAST)
            fitted = np.stack([_ridge(f, w) for f, w in zip(features, wanted, strict=True)])
            rows.append(fitted)
            given.append(np.log2(np.exp2(np.einsum("htf,hf->ht", features, fitted)).mean(0)))
        return Probe(np.stack(rows).astype(np.float32), float(np.mean(given)))


def features_of(free: Array, v: Array) -> Array:
    """What a probe sees of position-free keys and of values, `[heads, tokens, dim]`: (k, ln|k|, ln|v|, 1)."""
    norms = [np.log(np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)) for x in (free, v)]
    return np.concatenate([free, *norms, np.ones_like(norms[0])], -1)


def by_noise(
    layers: tuple[LayerSpec, ...], kv: KV, judge: Judge, after: int, plans: Sequence[Plan]
) -> Sensitivity:
    """Weights from what noise in K or V of one layer at a time does to the KL of the `after` next tokens. For
    engines without gradients; two runs a layer, and no probes.
    """
    generator = np.random.default_rng(0)
    weights = []
    for layer in range(len(layers)):
        pair = []
        for side in (0, 1):
            changed = [list(each) for each in kv]
            array = np.array(kv[layer][side], np.float32)
            spread = max(NOISE * float(array[:, SINKS:].std(axis=1).mean()), LEAST)
            array[:, SINKS:] += generator.normal(0, spread, array[:, SINKS:].shape)
            changed[layer][side] = array
            felt = judge.effect([(k, v) for k, v in changed]).mean / (array[:, SINKS:].size * spread**2)
            pair.append(2 * after * max(felt, 0.0))
        weights.append((pair[0], pair[1]))
    return Sensitivity(_roots(weights), tuple(None for _ in plans))


def weight_of(part: Plan, layers: tuple[LayerSpec, ...], weights: Iterable[tuple[float, float]]) -> Floats:
    """A part's weights, one a number: each layer's over all its heads."""
    known = list(weights)
    found = []
    for segment in part.segments:
        side = 0 if segment.array.startswith("k") else 1
        for layer in part.layers:
            spec = layers[layer]
            size = spec.heads * (spec.k_dim if side == 0 else spec.v_dim)
            found.append(np.full(size, known[layer][side], np.float32))
    return np.concatenate(found)


def _roots(squares: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Weights from squared ones. What nothing looked at must not get errors without bound."""
    largest = max(max(pair) for pair in squares)
    if not largest > 0:
        raise UnsupportedModel("the model's next tokens do not depend on its KV")
    least = LEAST * largest
    return tuple((float(np.sqrt(max(k, least))), float(np.sqrt(max(v, least)))) for k, v in squares)


def _ridge(features: Array, wanted: Array) -> Array:
    wide = features.astype(np.float64)
    square = wide.T @ wide + RIDGE * np.eye(wide.shape[1])
    solved: Array = np.linalg.solve(square, wide.T @ wanted)
    return solved
