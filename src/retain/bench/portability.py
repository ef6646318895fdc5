"""Portability: KV that one engine computed is continued by another, and how far that is from its own.

Every engine prefills the texts and says what it thinks of the tokens that follow, which are forced; then it
does the same on the KV of every other. KL is against the reader's own prefill, beside its own noise between
two batch sizes (for llama.cpp also between flash attention and none).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retain.bench.gguf_files import float_gguf
from retain.bench.handshake import Side, agreement, blocks_in, kls, put, score
from retain.bench.progress import Steps
from retain.bench.report import Report, Value
from retain.bench.texts import long_prompt
from retain.block import Block
from retain.dtypes import converted
from retain.engines.scoring import Scored, Text
from retain.handshake import Verdict, interchanged
from retain.models import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORCED_TOKENS = 50


@dataclass(frozen=True)
class Party:
    """An engine in one way of running it: `name` is its part of a ratio's name."""

    name: str
    side: Side
    other: Mapping[str, Any] | None = None
    """Options of yet another way of computing the same, for the noise."""


def run(
    lengths: Sequence[int], texts: int, pythons: Mapping[str, str], engines: Sequence[str] = ()
) -> Report:
    """KV of every party in every other. `pythons` names the Python of engines that are installed elsewhere.

    Raises HandshakeError where an engine does not run.
    """
    parties = [each for each in _parties(pythons) if not engines or each.name in engines]
    samples = _texts(lengths, texts)
    total = len(parties) * (len(parties) + 1)
    with (
        tempfile.TemporaryDirectory(prefix="retain-portability-") as name,
        Steps("portability", total) as steps,
    ):
        return _Bench(parties, samples, Path(name), steps).report()


def plot(report: Report) -> Figure:
    """KL of every direction beside the reader's noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in report.rows if "kl" in row]
    places = np.arange(len(rows))
    floor = 1e-13
    axes.bar(places - 0.2, [max(_number(row["kl"]), floor) for row in rows], 0.4, label="on the other's KV")
    axes.bar(places + 0.2, [max(_number(row["noise"]), floor) for row in rows], 0.4, label="own noise")
    axes.set_xticks(places, [f"{row['from']}\nto {row['to']}" for row in rows], rotation=90, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("mean KL, nats")
    axes.legend()
    return figure


class _Bench:
    def __init__(self, parties: Sequence[Party], texts: Sequence[Text], folder: Path, steps: Steps) -> None:
        self._parties = parties
        self._texts = texts
        self._folder = folder
        self._cold: dict[str, Scored] = {}
        self._noise: dict[str, float] = {}
        self._rows: list[dict[str, Value]] = []
        self._ratios: dict[str, float] = {}
        self._steps = steps

    def report(self) -> Report:
        for party in self._parties:
            self._alone(party)
        for reader in self._parties:
            for writer in self._parties:
                if writer.name != reader.name:
                    self._direction(writer, reader)
        return Report("portability", self._rows, self._ratios, {})

    def _tier(self, name: str) -> str:
        return f"disk:{self._folder / name}"

    def _score(self, party: Party, tiers: Sequence[str], label: str, **more: Any) -> Scored:
        side = more.pop("side", party.side)
        trust = more.pop("trust", ())
        records = self._folder / f"records-{label}"
        return score(side, self._texts, tiers, self._folder / label, records=records, trust=trust, **more)

    def _alone(self, party: Party) -> None:
        cold = self._cold[party.name] = self._score(party, [self._tier(party.name)], party.name)
        self._steps.step(f"{party.name} alone")
        again = [self._score(party, [], f"{party.name}-again", batch=party.side.batch)]
        if party.other is not None:
            side = replace(party.side, options={**party.side.options, **party.other})
            again.append(self._score(party, [], f"{party.name}-other", side=side))
        self._noise[party.name] = max(_kl(cold, each) for each in again)
        self._steps.step(f"{party.name}'s noise")

    def _direction(self, writer: Party, reader: Party) -> None:
        wrote, own = self._cold[writer.name], self._cold[reader.name]
        for interchange in ("held", "float16"):
            if interchange == "float16" and wrote.spec.dtype != "float32":
                continue
            label = f"{writer.name}-{reader.name}-{interchange}"
            spec = wrote.spec if interchange == "held" else interchanged(wrote.spec)
            for text in self._texts:
                blocks = blocks_in(self._tier(writer.name), text, wrote)
                if interchange == "float16":
                    blocks = [_as(converted(b, "float16"), spec.variant) for b in blocks]
                put(self._tier(label), blocks)
            party = replace(wrote.party, variant=spec.variant, dtype=spec.dtype)
            trusted = Verdict(own.spec.kin, own.party, party, True, 0.0, 0.0, 0.0, (), ())
            found = self._score(reader, [self._tier(label)], label, trust=[trusted])
            self._told(writer, reader, interchange, own, found)
        self._steps.step(f"{writer.name} to {reader.name}")

    def _told(self, writer: Party, reader: Party, interchange: str, own: Scored, found: Scored) -> None:
        apart = np.concatenate([kls(a.logits, b.logits) for a, b in _pairs(own, found)])
        top1 = float(np.mean([agreement(a.logits, b.logits) for a, b in _pairs(own, found)]))
        moving = [each.load_seconds for each in found.scores]
        prefill = [each.first_seconds for each in own.scores]
        name = f"portability.{writer.name}_{reader.name}"
        if interchange == "float16":
            name += ".f16"
        self._ratios[f"{name}.kl"] = float(apart.mean())
        self._ratios[f"{name}.top1"] = top1
        self._ratios[f"{name}.moving_over_prefill"] = moving[-1] / prefill[-1]
        self._rows.append(
            {
                "from": writer.name,
                "to": reader.name,
                "interchange": own.spec.dtype if interchange == "held" else "float16",
                "reused_tokens": sum(sum(each.classes.values()) for each in found.scores),
                "kl": float(apart.mean()),
                "kl_most": float(apart.max()),
                "noise": self._noise[reader.name],
                "top1": top1,
                "moving_seconds": moving[-1],
                "prefill_seconds": prefill[-1],
            }
        )


def _pairs(a: Scored, b: Scored) -> list[tuple[Any, Any]]:
    return list(zip(a.scores, b.scores, strict=True))


def _kl(a: Scored, b: Scored) -> float:
    return float(np.mean([kls(x.logits, y.logits).mean() for x, y in _pairs(a, b)]))


def _as(block: Block, variant: bytes) -> Block:
    return Block(replace(block.header, variant=variant), block.tokens, block.arrays)


def _parties(pythons: Mapping[str, str]) -> list[Party]:
    """The engines with the same float weights, and llama.cpp with the packaged model's quantised ones."""
    quantised = find("smollm2")
    model = str(float_gguf(quantised).path)
    here = pythons.get("transformers", sys.executable)
    exact = {"dtype": "float32", "flash": False}
    found = [
        Party("transformers", Side("transformers", model, here, batch=512)),
        Party("llamacpp", Side("llamacpp", model, here, exact, batch=64)),
        Party(
            "llamacpp-f16", Side("llamacpp", model, here, {"dtype": "float16"}, batch=64), {"flash": False}
        ),
        Party(
            "llamacpp-q4",
            Side("llamacpp", str(quantised.path), here, {"dtype": "float16"}, batch=64),
            {"flash": False},
        ),
    ]
    if "vllm" in pythons:
        found.append(Party("vllm", Side("vllm", model, pythons["vllm"], batch=512)))
    return found


def _texts(lengths: Sequence[int], count: int) -> list[Text]:
    """Texts of each length from different places of Python's library, the longest last."""
    from retain.engines.transformers.loading import load_tokenizer

    tokenizer = load_tokenizer("smollm2")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    longest = max(lengths) + FORCED_TOKENS
    ids = long_prompt(encode, longest * count)
    cut = []
    for length in sorted(lengths):
        for number in range(count):
            start = number * longest
            end = start + length
            cut.append(Text(ids[start:end], ids[end : end + FORCED_TOKENS]))
    return cut


def _number(value: Value) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
