"""Forms: what an object's name says behind its key, and which forms serve a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retain.codecs import CODECS
from retain.fidelity import QUALITIES, accepts, decoded_lineage, quality_of
from retain.model import ModelSpec, Slice


@dataclass(frozen=True)
class Form:
    """Variant, slice, codec and lineage of an object."""

    text: str
    variant: bytes
    slice: Slice
    codec: str
    lineage: bytes | None

    @classmethod
    def parse(cls, text: str) -> Form:
        parts = text.split(".")
        return cls(
            text,
            bytes.fromhex(parts[0]),
            Slice.parse(parts[1]),
            parts[2],
            bytes.fromhex(parts[3]) if len(parts) == 4 else None,
        )

    def serves(self, spec: ModelSpec, fidelity: str) -> bool:
        """Whether numbers of this form may be given to a reader that accepts `fidelity` at the lowest."""
        if self.codec not in CODECS or self.variant != spec.variant[:16]:
            return False
        return accepts(fidelity, self.quality)

    @property
    def quality(self) -> str | None:
        """How near to exact numbers of this form are at the least: a lossy codec's object may hold better."""
        return quality_of(self.codec, self.lineage)

    @property
    def decoded(self) -> bytes | None:
        """The lineage of what an object of this form decodes to at the least, 16 bytes of it."""
        lossy = self.codec in CODECS and CODECS[self.codec].lossy
        lineage = decoded_lineage(self.codec, self.lineage) if lossy else self.lineage
        return None if lineage is None else lineage[:16]


class Forms:
    """The forms that a tier has met, by number. Not safe from several threads: the tier's lock guards it."""

    def __init__(self) -> None:
        self._forms: list[Form] = []
        self._ids: dict[str, int] = {}
        self._accepted: dict[tuple[bytes, Slice, str], tuple[int, list[int]]] = {}

    def __getitem__(self, number: int) -> Form:
        return self._forms[number]

    def known(self, text: str) -> int | None:
        """The number of a form, None if it was never met."""
        return self._ids.get(text)

    def number(self, text: str) -> int:
        """The number of a form. Raises ValueError for a text that is none."""
        number = self._ids.get(text)
        if number is None:
            number = len(self._forms)
            self._forms.append(Form.parse(text))
            self._ids[text] = number
        return number

    def serving(self, spec: ModelSpec, wanted: Slice, fidelity: str) -> list[int]:
        """The numbers of the forms that serve a reader of `wanted`: the best first, of equals the fastest to
        read."""
        question = (spec.variant, wanted, fidelity)
        known, found = self._accepted.get(question, (0, []))
        if known != len(self._forms):
            found = [
                number
                for number, form in enumerate(self._forms)
                if form.serves(spec, fidelity) and contains(form.slice, wanted)
            ]
            found.sort(key=lambda number: _rank(self._forms[number]))
            self._accepted[question] = (len(self._forms), found)
        return found


def _rank(form: Form) -> tuple[int, bool]:
    quality = form.quality
    return (QUALITIES.index(quality) if quality in QUALITIES else len(QUALITIES), form.codec != "raw")


def contains(held: Slice, wanted: Slice) -> bool:
    """Whether one slice lies wholly in another."""
    return (
        held.layer_start <= wanted.layer_start
        and held.layer_stop >= wanted.layer_stop
        and held.head_start * wanted.head_parts <= wanted.head_start * held.head_parts
        and held.head_stop * wanted.head_parts >= wanted.head_stop * held.head_parts
    )


def together(held: Sequence[Slice], wanted: Slice) -> bool:
    """Whether slices, taken together, cover another."""
    parts = int(np.lcm.reduce([each.head_parts for each in [*held, wanted]]))
    grid = np.zeros((wanted.layer_stop, parts), bool)
    for each in held:
        scale = parts // each.head_parts
        grid[each.layer_start : each.layer_stop, each.head_start * scale : each.head_stop * scale] = True
    scale = parts // wanted.head_parts
    share = slice(wanted.head_start * scale, wanted.head_stop * scale)
    return bool(grid[wanted.layer_start : wanted.layer_stop, share].all())
