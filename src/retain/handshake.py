"""The record of handshakes: which engine may read which other's KV, and how far they were apart when tried.

A handshake holds for the very engines and weights that were tried: each side is known by its variant and by
the producer that its blocks name, which tells the engine's version. How one is made is in
retain.bench.handshake.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from retain.digests import replacing
from retain.errors import ConfigError
from retain.fidelity import KINSHIPS
from retain.identity import digest
from retain.model import ModelSpec

_FORMAT = 1
_MOST = 4096


@dataclass(frozen=True)
class Party:
    """One side of a handshake: an engine with a model. `producer` is what its blocks name, with versions;
    `numeric` is float or quantised."""

    engine: str
    producer: str
    variant: bytes
    dtype: str
    numeric: str


@dataclass(frozen=True)
class Verdict:
    """How `reader` continues on the KV of `writer`: measured, and whether that will do.

    `k` and `v` are each layer's distance between both engines' own KV, relative to its size. `kl` is the mean
    KL in nats of the tokens that follow, against the reader's own prefill; `noise` the same between two ways
    in which the reader computes it alone; `top1` the share of equal likeliest tokens.
    """

    kin: bytes
    reader: Party
    writer: Party
    passed: bool
    kl: float
    noise: float
    top1: float
    k: tuple[float, ...]
    v: tuple[float, ...]
    reason: str = ""
    made: float = 0.0

    @property
    def kinship(self) -> str:
        """The class of what is shared: `kin`, or `kin-quantised` where one side's arithmetic is."""
        return KINSHIPS["quantised" in (self.reader.numeric, self.writer.numeric)]


@dataclass(frozen=True)
class Peer:
    """Another variant whose KV a reader takes beside its own."""

    variant: bytes
    dtype: str
    producer: str
    kinship: str

    def as_spec(self, spec: ModelSpec) -> ModelSpec:
        """The reader's spec as this peer's: to ask for its blocks."""
        return replace(spec, variant=self.variant, dtype=self.dtype)


def kept_as(spec: ModelSpec, interchange: str | None) -> ModelSpec:
    """The spec under which an engine keeps its KV, where it asks for a dtype of interchange. Raises
    ConfigError."""
    if interchange is None or interchange == spec.dtype:
        return spec
    if interchange != "float16":
        raise ConfigError(
            f"KV in {spec.dtype} is interchanged as it is or in float16, not in {interchange!r}"
        )
    return interchanged(spec)


def interchanged(spec: ModelSpec) -> ModelSpec:
    """The spec under which an engine with float32 KV keeps it in float16: half the bytes, another variant."""
    if spec.dtype != "float32":
        raise ConfigError(f"float16 interchange is for KV in float32; this engine's is {spec.dtype}")
    return replace(spec, dtype="float16", variant=_halved(spec.variant))


def _halved(variant: bytes) -> bytes:
    return digest("retain/interchange", variant, "float16")


def record_path() -> Path:
    """The record's file: $XDG_STATE_HOME/retain/handshakes.json, by default under ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME")
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    return home / "retain" / "handshakes.json"


def peers_of(spec: ModelSpec, producer: str, path: Path | None = None) -> tuple[Peer, ...]:
    """The variants whose KV a reader may take, by the handshakes that passed: float ones first."""
    return peers_in(read(path), spec, producer)


def peers_in(verdicts: Iterable[Verdict], spec: ModelSpec, producer: str) -> tuple[Peer, ...]:
    """The same from verdicts at hand."""
    found = []
    for each in verdicts:
        reader = (each.kin, each.reader.variant, each.reader.producer)
        if each.passed and reader == (spec.kin, spec.variant, producer):
            writer = each.writer
            found.append(Peer(writer.variant, writer.dtype, writer.producer, each.kinship))
            if writer.dtype == "float32":
                found.append(Peer(_halved(writer.variant), "float16", writer.producer, each.kinship))
    if spec.dtype == "float32":  # its own, where it kept it in float16
        found.insert(0, Peer(_halved(spec.variant), "float16", producer, KINSHIPS[0]))
    return tuple(sorted(found, key=lambda peer: KINSHIPS.index(peer.kinship)))


def read(path: Path | None = None) -> list[Verdict]:
    """Every verdict on record, the latest last. A record that cannot be read is an empty one."""
    try:
        document = json.loads((path or record_path()).read_bytes())
        rows = document["verdicts"] if document["format"] == _FORMAT else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    found = []
    for row in rows:
        with suppress(TypeError, ValueError, KeyError, AttributeError):
            found.append(_parsed(row))
    return found


def record(verdicts: Sequence[Verdict], path: Path | None = None) -> None:
    """Add verdicts; each takes the place of an earlier one about the same two sides. Raises OSError."""
    made = [replace(each, made=each.made or time.time()) for each in verdicts]
    sides = {_sides(each) for each in made}
    kept = [each for each in read(path) if _sides(each) not in sides]
    document = {"format": _FORMAT, "verdicts": [_rendered(each) for each in (*kept, *made)[-_MOST:]]}
    with replacing(path or record_path()) as temporary:
        temporary.write_text(json.dumps(document, indent=1))


def _sides(verdict: Verdict) -> tuple[bytes, Party, Party]:
    return verdict.kin, verdict.reader, verdict.writer


def _rendered(verdict: Verdict) -> dict[str, Any]:
    row = asdict(verdict)
    row["kin"] = verdict.kin.hex()
    for side in ("reader", "writer"):
        row[side]["variant"] = row[side]["variant"].hex()
    return row


def _parsed(row: dict[str, Any]) -> Verdict:
    sides = {
        side: Party(**{**row[side], "variant": bytes.fromhex(row[side]["variant"])})
        for side in ("reader", "writer")
    }
    numbers = {name: tuple(float(each) for each in row[name]) for name in ("k", "v")}
    return Verdict(**{**row, **sides, **numbers, "kin": bytes.fromhex(row["kin"])})
