"""Fidelity: how far KV may be from what the model itself computes, from exact down to the coarsest level.

What is computed on coded KV is as far off as that, whatever it is coded with itself. A block's lineage says
so: one digest a quality, so that blocks computed on KV of one quality find each other, and never stand where
better ones are meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

from retain.errors import ConfigError
from retain.identity import digest

QUALITIES = ("exact", "fine", "int8", "near", "balanced", "tiny")
"""From the best to the worst, by measured KL (docs/quality.md)."""

PROMISED = MappingProxyType({"fine": 2e-5, "int8": 2e-4, "near": 1.3e-4, "balanced": 9e-4, "tiny": 6e-3})
"""The mean KL of the next tokens, in nats, that each level promises at the most."""

KINSHIPS = ("kin", "kin-quantised")
"""KV of another variant of the same kin: of float arithmetic on both sides, or of quantised on one."""

ACCEPTABLE = (*QUALITIES, *KINSHIPS, "lossy", "fused")
"""What a request may name as the lowest fidelity it accepts. `kin` and `kin-quantised` take other variants'
KV, but nothing that was coded with loss; `lossy` any level; `fused` KV put together from parts too."""


def accepts(asked: str, quality: str | None) -> bool:
    """Whether a reader that accepts `asked` at the lowest takes KV of `quality`; None is one not known
    here."""
    if quality == "exact" or asked in ("lossy", "fused"):
        return quality is not None or asked == "fused"
    if asked in KINSHIPS:
        return quality in KINSHIPS and KINSHIPS.index(quality) <= KINSHIPS.index(asked)
    if quality is None or quality in KINSHIPS or asked == "exact":
        return False
    return QUALITIES.index(quality) <= QUALITIES.index(asked)


def checked(asked: str) -> str:
    """`asked` itself if a request may name it. Raises ConfigError."""
    if asked not in ACCEPTABLE:
        raise ConfigError(f"fidelity must be one of {', '.join(ACCEPTABLE)}, got {asked!r}")
    return asked


def quality_of(codec: str, lineage: bytes | None) -> str | None:
    """The quality of KV coded with `codec`, computed on KV of `lineage` (at least its first 16 bytes): the
    worse of both. None for the lineage of something else than coding."""
    own = codec if codec in QUALITIES else "exact"
    if lineage is None:
        return own
    below = _known().get(lineage[:16])
    if below in KINSHIPS:
        return below if own == "exact" else None
    return None if below is None else worst((own, below))


def held_codec(codec: str, parameters: str) -> str:
    """The codec of an object's streams: where a level cannot code a block, its object holds int8."""
    return parameters if parameters in QUALITIES else codec


def worst(qualities: Iterable[str]) -> str:
    """The lowest of these qualities, exact for none."""
    return max(qualities, key=QUALITIES.index, default="exact")


def lineage_of(quality: str) -> bytes | None:
    """The lineage of what is computed on KV of a quality; None for exact."""
    return None if quality == "exact" else digest("retain/lineage", quality)


def decoded_lineage(codec: str, lineage: bytes | None) -> bytes | None:
    """The lineage of what a lossy object decodes to."""
    quality = quality_of(codec, lineage)
    # Of a lineage that is not known here, what is coded on top differs from the rest of it.
    return digest("retain/lineage", codec, lineage) if quality is None else lineage_of(quality)


class Told(Protocol):
    """What a block's header tells of its fidelity."""

    @property
    def codec(self) -> str: ...

    @property
    def fidelity(self) -> str: ...

    @property
    def lineage(self) -> bytes | None: ...


def inherited(headers: Iterable[Told]) -> tuple[str, bytes | None]:
    """Fidelity and lineage of what is computed on a prefix of these blocks."""
    held = list(headers)
    lossy = {quality_of(each.codec, each.lineage) for each in held if each.fidelity == "lossy"}
    others = {(each.fidelity, each.lineage) for each in held if each.fidelity not in ("exact", "lossy")}
    if not others and None not in lossy:
        quality = worst(each for each in lossy if each is not None)
        return ("exact", None) if quality == "exact" else ("lossy", lineage_of(quality))
    if len(others) == 1 and not lossy:
        return others.pop()
    mixed = sorted({each.lineage or b"" for each in held})
    return "fused", digest("retain/lineage", mixed)


@lru_cache(maxsize=1)
def _known() -> MappingProxyType[bytes, str]:
    words = (*QUALITIES, *KINSHIPS)
    found = {lineage[:16]: quality for quality in words if (lineage := lineage_of(quality)) is not None}
    return MappingProxyType(found)
