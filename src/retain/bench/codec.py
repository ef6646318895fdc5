"""Bench `codec`: how many bits each codec takes for real KV, and what that does to the tokens that follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retain.bench import codec_rivals as rivals
from retain.bench.codec_objects import LEVELS, lossless, through_objects
from retain.bench.codec_rivals import Coded, Layers
from retain.bench.codec_speed import rans_speeds
from retain.bench.codec_texts import Document, documents
from retain.bench.progress import Steps
from retain.bench.report import Report, Value, new_figure
from retain.codecs.ladder.profile import Profile
from retain.codecs.ladder.shelf import profile_for
from retain.errors import ConfigError
from retain.identity import BLOCK_TOKENS
from retain.profile.gather import arrays_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retain.engines.transformers.study import Effect, Reference, Study

CONTEXT_TOKENS = 2048
AFTER_TOKENS = 384
LOSSLESS = "lossless (bf16)"
PREFILLS = 2
"""How often a context is computed for the time it takes; the shortest counts."""


@dataclass(frozen=True)
class Contender:
    """A codec under test; `code` gets a document and its context's KV."""

    name: str
    code: Callable[[Document, Layers], Coded]


@dataclass
class Found:
    """What a contender did with every document, in their order."""

    effects: list[Effect] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def bpv(self) -> float:
        """Bits a value, over all documents."""
        return float(np.mean(self.bits))


def run(
    model: str = "smollm2",
    files: Sequence[Path] = (),
    data: Path | None = None,
    peers: str | None = None,
    codecs: Sequence[str] = (),
    context: int = CONTEXT_TOKENS,
    after: int = AFTER_TOKENS,
) -> Report:
    """Code `context` tokens of each text with every codec, and evaluate the next `after` tokens on what is
    read back.

    The model computes in float32. Retain's levels need a profile of it: `retain profile MODEL`. `peers` is
    the Python of a venv with LMCache; without it CacheGen is left out. `codecs` are those to judge, by
    default all. Raises ConfigError.
    """
    from retain.engines.transformers.loading import load, prepared
    from retain.engines.transformers.study import Study

    loaded = load(model)
    study = Study(loaded)
    texts = documents(loaded.tokenizer.encode, context + after + 1, files, data)
    profile = profile_for(loaded.spec.kin)
    if profile is None:
        raise ConfigError(
            f"there is no profile of {loaded.spec.name}: make one with `retain profile {model}`"
        )
    contenders = [
        Contender("fp16", lambda _, kv: rivals.float16(kv)),
        Contender("bf16", lambda _, kv: rivals.bfloat16(kv)),
        Contender(LOSSLESS, lambda text, kv: lossless(study.spec, text.tokens, kv)),
        Contender("int8 a token and head", lambda _, kv: rivals.int8(kv)),
        Contender("fp8 e4m3", lambda _, kv: rivals.fp8(kv)),
        Contender("KIVI 4 bit", lambda _, kv: rivals.kivi(kv)),
    ]
    if peers is not None:
        folder = prepared(model)
        contenders.append(
            Contender("CacheGen (LMCache)", lambda _, kv: rivals.lmcache_cachegen(kv, peers, folder))
        )
    contenders.extend(Contender(level, _level(study, level)) for level in LEVELS)
    if codecs:
        known = {_key(each.name): each for each in contenders}
        if unknown := [name for name in codecs if name not in known]:
            raise ConfigError(f"no codec {unknown[0]!r} is judged here; known are {', '.join(known)}")
        contenders = [each for key, each in known.items() if key in codecs]
    found = {each.name: Found() for each in contenders}
    prefill: list[float] = []
    speeds: tuple[float, float] | None = None
    with Steps("codec", len(texts) * (len(contenders) + 1)) as steps:
        for text in texts:
            steps.step(f"{text.kind}: the model's own KV", 0)
            kv, seconds = _context(study, text, context)
            prefill.append(seconds)
            if speeds is None and context >= 2 * BLOCK_TOKENS:
                speeds = _speeds(study, profile, kv, text)
            reference = study.reference(kv, text.tokens[context : context + after + 1])
            steps.step(f"{text.kind}: the model's own KV")
            for each in contenders:
                steps.step(f"{text.kind}: {each.name}", 0)
                _judge(each, text, kv, reference, found[each.name])
                steps.step(f"{text.kind}: {each.name}")
    report = _report(texts, found, prefill)
    if speeds is None:
        return report
    ratios = dict(zip(("codec.rans.encode_gsym_per_s", "codec.rans.decode_gsym_per_s"), speeds, strict=True))
    return replace(report, ratios={**report.ratios, **ratios})


def _speeds(study: Study, profile: Profile, kv: Layers, text: Document) -> tuple[float, float]:
    """The entropy coder's on the second block, for the first holds sinks."""
    span = slice(BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    block = arrays_of(study.spec.layers, [(k[:, span], v[:, span]) for k, v in kv])
    return rans_speeds(profile, block, text.tokens[span], BLOCK_TOKENS)


def _level(study: Study, level: str) -> Callable[[Document, Layers], Coded]:
    return lambda text, kv: through_objects(study.spec, text.tokens, kv, level)


def _context(study: Study, text: Document, context: int) -> tuple[Layers, float]:
    seconds = []
    for _ in range(PREFILLS):
        started = time.perf_counter()
        kv = study.context(text.tokens[:context])
        seconds.append(time.perf_counter() - started)
    return kv, min(seconds)


def _judge(each: Contender, text: Document, kv: Layers, reference: Reference, found: Found) -> None:
    coded = each.code(text, kv)
    found.effects.append(reference.effect(coded.layers))
    found.bits.append(coded.bits / sum(k.size + v.size for k, v in kv))
    found.encode_seconds.append(coded.encode_seconds)
    found.decode_seconds.append(coded.decode_seconds)


def _report(texts: Sequence[Document], found: dict[str, Found], prefill: Sequence[float]) -> Report:
    rows: list[dict[str, Value]] = []
    ratios: dict[str, float] = {}
    for name, each in found.items():
        kl = float(np.mean([effect.mean for effect in each.effects]))
        row: dict[str, Value] = {
            "codec": name,
            "bits_per_value": each.bpv,
            "ratio": 16 / each.bpv,
            "mean_kl": f"{kl:.1e}",
            "p99_kl": f"{np.mean([effect.p99 for effect in each.effects]):.1e}",
            "top1_rate": float(np.mean([effect.top1 for effect in each.effects])),
            "delta_nll": f"{np.mean([effect.nll for effect in each.effects]):+.1e}",
        }
        for text, effect in zip(texts, each.effects, strict=True):
            row[f"kl_{text.kind}"] = f"{effect.mean:.1e}"
        if min(each.encode_seconds) > 0:
            row["encode_x_prefill"] = float(np.median(np.divide(prefill, each.encode_seconds)))
            row["decode_x_prefill"] = float(np.median(np.divide(prefill, each.decode_seconds)))
        rows.append(row)
        key = _key(name)
        ratios[f"codec.{key}.ratio"] = 16 / each.bpv
        ratios[f"codec.{key}.kl"] = kl
        for direction in ("encode", "decode"):
            if f"{direction}_x_prefill" in row:
                ratios[f"codec.{key}.{direction}_over_prefill"] = float(row[f"{direction}_x_prefill"] or 0)
    checks: dict[str, bool] = {}
    if {"bf16", LOSSLESS} <= found.keys():
        pairs = zip(found[LOSSLESS].effects, found["bf16"].effects, strict=True)
        checks["lossless_is_exact"] = all(np.array_equal(mine.kl, bf16.kl) for mine, bf16 in pairs)
    return Report("codec", rows, ratios, checks)


def _key(name: str) -> str:
    """How ratios are called for a codec, and what a user types."""
    return _KEYS.get(name, name)


_KEYS = {
    LOSSLESS: "lossless",
    "int8 a token and head": "int8",
    "fp8 e4m3": "fp8",
    "KIVI 4 bit": "kivi4",
    "CacheGen (LMCache)": "cachegen",
}
"""A word for each codec whose name in the table is more than that."""


def plot(report: Report) -> Figure:
    """Mean KL over bits a value, both logarithmic; Retain's levels joined by a line."""
    figure, axes = new_figure(8.0, 5.0)
    points = {
        str(row["codec"]): (float(row["bits_per_value"] or 0), float(str(row["mean_kl"])))
        for row in report.rows
    }
    line = [points[level] for level in LEVELS if level in points]
    axes.plot(*zip(*line, strict=True), "o-", color="#1f77d0", label="Retain's levels")
    for name, (bits, kl) in points.items():
        if name.startswith("lossless"):
            continue
        if name not in LEVELS:
            axes.plot(bits, kl, "o", color="#8a93a3")
        right = bits < 12
        axes.annotate(
            name, (bits, kl), xytext=(6 if right else -6, 5), textcoords="offset points", color="0.25",
            ha="left" if right else "right",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_yscale("log")
    axes.set_xlabel("bits a value (logarithmic)")
    axes.set_ylabel("mean KL of the next tokens, nats (logarithmic)")
    axes.legend(frameon=False)
    return figure
