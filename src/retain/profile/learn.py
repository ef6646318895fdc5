"""Learning: from gathered KV and sensitivities to a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array
from retain.codecs.ladder.learn import learn_tables
from retain.codecs.ladder.profile import Floats, Part, Profile
from retain.identity import Tokens
from retain.model import ModelSpec
from retain.profile.gather import Gathered, Sample
from retain.profile.sensitivity import Sensitivity, weight_of

WIDTH = 2048
"""The width that parts have by default, at the most: coding costs as many multiplications a number, and twice
as wide it would no longer be several times faster than computing the KV of a small model."""

FAST_WIDTH = 512
"""The width of parts of a fast profile, at the most."""

ROWS = 8192
"""Rows at a time, so that a covariance in float64 is summed over products in float32."""

WORTH = 0.03
"""The share of a part's bits that knowing the tokens has to save to be kept in the profile."""

PREDICTED = 512
"""Components that are predicted from the token, at the most: those behind hardly depend on it alone."""


@dataclass(frozen=True, eq=False)
class Known:
    """What tokens alone tell of a part: `means[i]` of weighted rows for the i-th of the tokens seen twice or
    more, and how much the mean of n of them is trusted: n / (n + doubt)."""

    ids: npt.NDArray[np.uint32]
    means: Floats
    residual: Floats


def group_for(spec: ModelSpec, width: int) -> int:
    """How many layers a part has for parts of at most `width` numbers; one at the least."""
    widest = max(layer.heads * (layer.k_dim + layer.v_dim) for layer in spec.layers)
    return max(1, min(width // widest, len(spec.layers)))


def learn(
    spec: ModelSpec,
    gathered: Gathered,
    sensitivity: Sensitivity,
    samples: Sequence[Sample],
    step: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """The profile of a model. `samples`, none of them gathered, give the entropy coder's tables. `step` is
    that of the level `fine`, in weighted numbers.
    """
    ids = gathered.ids
    tokens = _repeated(ids)
    worth = True
    parts = []
    for number, each in enumerate(gathered.plans):
        progress(f"principal components, part {number + 1} of {len(gathered.plans)}")
        weight = weight_of(each, spec.layers, sensitivity.weights)
        rows = gathered.rows(number)
        mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        rows -= mean
        rows *= weight
        values, basis = _components(rows)
        predicted: Array | None = None
        if worth and tokens.size:
            known = _known(rows, ids, tokens)
            better, turned = _components(known.residual)
            before, after = _bits(values, step), _bits(better, step)
            worth = after < (1 - WORTH) * before  # deeper layers depend on single tokens less and less
            if worth:
                basis = turned
                predicted = np.ascontiguousarray((known.means @ basis[:PREDICTED].T).astype(np.float16))
        probe = sensitivity.probes[number]
        parts.append(
            Part(
                each.segments,
                mean,
                weight,
                basis.astype(np.float16),
                np.zeros(each.width, np.uint8),
                None if probe is None else probe.weights,
                0.0 if probe is None else probe.center,
                predicted,
            )
        )
    profile = Profile(
        kin=spec.kin,
        model=spec.name,
        layers=spec.layers,
        sinks=sensitivity.sinks,
        step=step,
        parts=tuple(parts),
        token_ids=tokens if any(part.predicted is not None for part in parts) else tokens[:0],
    )
    return with_tables(profile, samples)


def with_tables(profile: Profile, samples: Sequence[Sample]) -> Profile:
    """The profile with tables, and classes to expect, for its step."""
    return learn_tables(profile, ((s.arrays, s.tokens, s.first) for s in samples), "float32")


def _components(rows: Floats) -> tuple[Floats, Floats]:
    """Variances and principal components (as rows), by falling variance."""
    width = rows.shape[1]
    covariance = np.zeros((width, width))
    for at in range(0, len(rows), ROWS):
        piece = rows[at : at + ROWS]
        covariance += piece.T @ piece
    values, vectors = np.linalg.eigh(covariance / len(rows))
    return values[::-1].astype(np.float32), np.ascontiguousarray(vectors[:, ::-1].T, np.float32)


def _bits(variances: Floats, step: float) -> float:
    """About how many bits a token's components take at the step of `balanced`, by their variances."""
    return float(0.5 * np.log2(1 + np.maximum(variances, 0) / (9 * step) ** 2).sum())


def _repeated(ids: Tokens) -> npt.NDArray[np.uint32]:
    seen, counts = np.unique(ids, return_counts=True)
    return seen[counts > 1].astype(np.uint32)


def _known(rows: Floats, ids: Tokens, tokens: npt.NDArray[np.uint32]) -> Known:
    """What the tokens tell, and each row less what the *other* rows of its token tell."""
    place = np.minimum(np.searchsorted(tokens, ids), tokens.size - 1)
    held = tokens[place] == ids
    order = np.argsort(place[held], kind="stable")
    sorted_rows = rows[held][order]
    counts = np.bincount(place[held], minlength=tokens.size)
    sums = np.add.reduceat(sorted_rows, np.concatenate([[0], np.cumsum(counts)[:-1]]), axis=0)
    n = counts.astype(np.float32)
    # Within a token's rows against all: how far a mean of few can be trusted.
    whole = float((sorted_rows**2).sum())
    within = whole - float(((sums**2).sum(axis=1) / n).sum())
    share = min(0.98, max(0.02, within / max(1.0, float((n - 1).sum())) / (whole / float(n.sum()))))
    doubt = share / (1 - share)
    residual = rows.copy()
    others = (sums[place[held]] - rows[held]) / (n[place[held]] - 1 + doubt)[:, None]
    residual[held] -= others
    return Known(tokens, sums / (n + doubt)[:, None], residual)
