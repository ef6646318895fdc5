"""The handshake: each engine prefills a probe, then continues on the other's KV, and both are compared.

K and V are compared layer by layer in the canonical form that the cache keeps. Then each engine's KV is put
into the other: all of it, and behind a first block of the reader's own, at positions that are not zero; where
layers slide, the probe is longer than their window. What is compared at the end are the next tokens'
distributions, beside the reader's own noise between two ways of computing the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import retain
from retain.block import Block
from retain.cache import Cache, Query
from retain.dtypes import converted
from retain.engines.scoring import Job, Scored, Text, read_scored, run
from retain.errors import RetainError
from retain.handshake import Verdict, record
from retain.identity import BLOCK_TOKENS, as_tokens, chain, space_of

PROBE_TOKENS = 2 * BLOCK_TOKENS + 40
FORCED_TOKENS = 8
SECONDS = 900.0

MOST_APART = {"float": 0.02, "quantised": 0.4}
"""How far a layer's K and V may lie apart, relative to their size: 0.0005 was measured between float engines
with float16 KV and 0.06 with quantised arithmetic on one side; 1.4 where pairs are not permuted."""

MOST_KL = {"float": 1e-3, "quantised": 0.1}
"""And the mean KL of the next tokens in nats: 1e-6 and 3e-3 were measured; 4 where pairs are not permuted."""

NOISE_FACTOR = 4.0

Numbers = npt.NDArray[np.float32]


class HandshakeError(RetainError):
    """A side could not be run; the text has the last lines of what it said."""


@dataclass(frozen=True)
class Side:
    """An engine that takes part: with which Python (None: in this process), which model, and its own
    options."""

    engine: str
    model: str
    python: str | None = sys.executable
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 96
    """Tokens at a time in the second way of computing, for the noise."""


def shake(sides: Sequence[Side], probe: Sequence[int], *, keep: Path | None = None) -> list[Verdict]:
    """Handshakes of every pair of sides, both ways, added to the record. `probe` are token ids.

    Raises HandshakeError where a side does not run at all.
    """
    text = Text(list(probe[:-FORCED_TOKENS]), list(probe[-FORCED_TOKENS:]))
    verdicts = []
    with _folder(keep) as folder:
        runs = [_alone(side, [text], folder / f"side{number}") for number, side in enumerate(sides)]
        for writer, theirs in enumerate(runs):
            for reader, ours in enumerate(runs):
                if reader != writer:
                    place = folder / f"{writer}-to-{reader}"
                    place.mkdir()
                    verdicts.append(_judge(sides[reader], ours, theirs, text, place))
    record(verdicts)
    return verdicts


@dataclass(frozen=True, eq=False)
class Alone:
    """What a side says by itself: its prefill, whose KV lies in `tier`, and a second way to compute it."""

    scored: Scored
    noise: Scored
    tier: str


def _alone(side: Side, texts: Sequence[Text], folder: Path) -> Alone:
    folder.mkdir(parents=True, exist_ok=True)
    tier = f"disk:{folder / 'kept'}"
    cold = score(side, texts, [tier], folder / "cold", records=folder / "none")
    again = score(side, texts, [], folder / "noise", records=folder / "none", batch=side.batch)
    return Alone(cold, again, tier)


def _judge(side: Side, ours: Alone, theirs: Alone, text: Text, folder: Path) -> Verdict:
    """One direction: the reader `ours` on the KV of `theirs`."""
    reader, writer = ours.scored, theirs.scored
    numeric = "quantised" if "quantised" in (reader.party.numeric, writer.party.numeric) else "float"
    verdict = Verdict(
        reader.spec.kin,
        reader.party,
        writer.party,
        False,
        0.0,
        0.0,
        0.0,
        (),
        (),
        "another kin: other weights",
    )
    if reader.spec.kin != writer.spec.kin:
        return verdict
    if reader.spec.layers != writer.spec.layers:
        return replace(verdict, reason="the engines hold layers of other shapes")
    mine, others = blocks_in(ours.tier, text, reader), blocks_in(theirs.tier, text, writer)
    k, v = distances(mine, others)
    noise = mean_kl(reader.scores[0].logits, ours.noise.scores[0].logits)
    trusted = replace(verdict, passed=True)
    worst, top1 = 0.0, 1.0
    for name, kept in (("all", others), ("behind", [*mine[:1], *others[1:]])):
        tier = f"disk:{folder / name}"
        put(tier, kept)
        trial = score(
            side, [text], [tier], folder / f"{name}-run", records=folder / "trusted", trust=[trusted]
        )
        found = trial.scores[0]
        if not sum(found.classes.values()):
            return replace(verdict, k=k, v=v, noise=noise, reason="the reader took nothing of what was kept")
        worst = max(worst, mean_kl(reader.scores[0].logits, found.logits))
        top1 = min(top1, agreement(reader.scores[0].logits, found.logits))
    reason = ""
    if not max(*k, *v) <= MOST_APART[numeric]:
        reason = f"K or V of a layer lie {max(*k, *v):.2g} of their size apart"
    elif not worst <= max(MOST_KL[numeric], NOISE_FACTOR * noise):
        reason = f"the next tokens differ by a KL of {worst:.2g}"
    return replace(verdict, passed=not reason, kl=worst, noise=noise, top1=top1, k=k, v=v, reason=reason)


def score(
    side: Side,
    texts: Sequence[Text],
    tiers: Sequence[str],
    place: Path,
    *,
    records: Path,
    trust: Sequence[Verdict] = (),
    batch: int | None = None,
) -> Scored:
    """Run a job of a side in a process of its own, which knows the handshakes of `trust` alone.

    Raises HandshakeError.
    """
    job = Job(side.engine, side.model, list(texts), list(tiers), batch, options=dict(side.options))
    path = place.with_suffix(".json")
    path.write_text(json.dumps(asdict(job)))
    if trust:
        record(list(trust), records / "retain" / "handshakes.json")
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(records)}
    if side.python is None:
        with surroundings(environment):
            return run(job)
    try:
        ran = subprocess.run(
            [side.python, "-m", "retain.engines.scoring", str(path)],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise HandshakeError(f"{side.engine} did not finish within {SECONDS:.0f} s") from error
    try:
        return read_scored(path)
    except (OSError, ValueError, KeyError) as error:
        said = " / ".join((ran.stderr or ran.stdout).strip().splitlines()[-3:])
        raise HandshakeError(f"{side.engine} could not be run with {side.model}: {said}") from error


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def surroundings(values: Mapping[str, str]) -> Iterator[None]:
    """These environment variables, for as long as the block runs."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def blocks_in(tier: str, text: Text, scored: Scored) -> list[Block]:
    """The blocks of a prompt that a side wrote to a tier, in memory of their own."""
    keys = chain(space_of(scored.spec.kin), as_tokens(text.prompt))
    with _opened(tier) as cache:
        query = Query(keys, scored.spec)
        with cache.load(cache.lookup(query, plan=False)) as loaded:
            return [
                Block(b.header, b.tokens.copy(), {name: array.copy() for name, array in b.arrays.items()})
                for b in loaded.blocks
            ]


def put(tier: str, blocks: Sequence[Block]) -> None:
    """Write blocks to a tier."""
    with _opened(tier) as cache:
        for block in blocks:
            cache.store(block)
        cache.flush()


def distances(mine: Sequence[Block], others: Sequence[Block]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How far K and V of two engines lie apart, by layer, relative to their size."""
    layers = len(mine[0].header.layers) if mine else 0
    k, v = np.zeros((layers, 2)), np.zeros((layers, 2))
    for own, other in zip(mine, others, strict=False):
        count = min(own.header.count, other.header.count)
        a, b = converted(own, "float32"), converted(other, "float32")
        for layer in range(layers):
            for sums, x, y in zip((k, v), a.layer(layer), b.layer(layer), strict=True):
                if x is not None and y is not None:
                    near, far = x[:, :count].astype(np.float64), y[:, :count].astype(np.float64)
                    sums[layer] += (((near - far) ** 2).sum(), (near**2).sum())
    shares = [np.sqrt(sums[:, 0] / np.maximum(sums[:, 1], 1e-30)) for sums in (k, v)]
    return tuple(shares[0].tolist()), tuple(shares[1].tolist())


def kls(wanted: Numbers, found: Numbers) -> npt.NDArray[np.float64]:
    """KL divergence in nats of each row's distribution `found` from `wanted`."""
    p, q = _log_softmax(wanted), _log_softmax(found)
    rows: npt.NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return np.maximum(rows, 0.0)


def mean_kl(wanted: Numbers, found: Numbers) -> float:
    return float(kls(wanted, found).mean())


def agreement(wanted: Numbers, found: Numbers) -> float:
    """The share of rows with the same likeliest token."""
    return float((wanted.argmax(-1) == found.argmax(-1)).mean())


def _log_softmax(logits: Numbers) -> npt.NDArray[np.float64]:
    scores = logits.astype(np.float64)
    scores = scores - scores.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return found


@contextmanager
def _opened(tier: str) -> Iterator[Cache]:
    with retain.open("memory:1GiB", tier) as cache:
        if not isinstance(cache, Cache):
            raise TypeError("a handshake's tier is a folder of its own")
        yield cache


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="retain-handshake-") as name:
        yield Path(name)
