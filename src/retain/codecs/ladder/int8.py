"""int8: whole numbers of 8 bits a token and head, entropy coded; needs no profile.

Each token's numbers of a head are multiples of their largest magnitude / 127. A channel's numbers, less their
mean, are coded as the components of a part are: thirds first, then one refinement.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array, Encoded
from retain.codecs.ladder.levels import CLASSES, UNIT_CLASS
from retain.codecs.ladder.quantise import Unencodable
from retain.codecs.ladder.standard import standard_tables
from retain.codecs.ladder.transform import from_floats, to_floats
from retain.codecs.lossless import Lossless
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Tokens

PEAK = 127
_EXPECTED = UNIT_CLASS + 6
_CHANNELS = 1 << 13


class Int8:
    """Streams of each array: scales (bfloat16), channel means, and for every 8,192 channels two more."""

    name = "int8"
    lossy = True

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        try:
            return Encoded(encode(arrays, header.dtype), self.name, exact=False)
        except Unencodable:
            return Encoded(Lossless().encode(arrays, tokens, header).streams, Lossless.name)

    def decode(
        self, streams: Mapping[str, Array], tokens: Tokens, header: BlockHeader, out: Mapping[str, Array]
    ) -> None:
        if header.parameters == Lossless.name:
            Lossless().decode(streams, tokens, header, out)
        elif header.parameters == self.name:
            decode(streams, header.dtype, out)
        else:
            raise InvalidObject(f"an int8 block cannot be coded by {header.parameters[:80]!r}")


def encode(arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """The streams of arrays `[layers, heads, tokens, dim]`. Raises Unencodable for what is not finite."""
    streams: dict[str, Array] = {}
    for name, array in arrays.items():
        numbers = to_floats(array, dtype)
        largest = np.abs(numbers).max(axis=3)
        if not np.isfinite(largest).all():
            raise Unencodable("the block holds numbers that are not finite")
        scales = np.empty(largest.shape, np.uint16)
        from_floats(largest / np.float32(PEAK), "bfloat16", scales)
        units = to_floats(scales, "bfloat16")
        whole = np.rint(numbers / np.where(units > 0, units, 1)[..., None]).astype(np.int16)
        channels = np.ascontiguousarray(whole.transpose(0, 1, 3, 2)).reshape(-1, array.shape[2])
        offsets = np.clip(np.rint(channels.mean(axis=1)), -PEAK, PEAK).astype(np.int8)
        channels -= offsets[:, None]
        streams[f"{name}.scales"] = scales.reshape(-1).view(np.uint8)
        streams[f"{name}.offsets"] = offsets.view(np.uint8)
        for at in range(0, len(channels), _CHANNELS):
            thirds, rest = _coded(channels[at : at + _CHANNELS])
            streams[f"{name}.thirds{at // _CHANNELS}"] = np.frombuffer(thirds, np.uint8)
            streams[f"{name}.rest{at // _CHANNELS}"] = np.frombuffer(rest, np.uint8)
    return streams


def decode(streams: Mapping[str, Array], dtype: str, out: Mapping[str, Array]) -> None:
    """Fill arrays from their streams. Raises InvalidObject."""
    expected = {name for array in out for name in _names(array, out[array].shape)}
    if streams.keys() != expected:
        raise InvalidObject(
            f"int8 block holds streams {sorted(streams)[:8]}, expected {sorted(expected)[:8]}"
        )
    for name, array in out.items():
        layers, heads, tokens, dim = array.shape
        scales, offsets = streams[f"{name}.scales"], streams[f"{name}.offsets"]
        if scales.size != 2 * layers * heads * tokens or offsets.size != layers * heads * dim:
            raise InvalidObject(f"the scales of {name} do not fit an array of shape {array.shape}")
        units = to_floats(scales.copy().view(np.uint16).reshape(layers, heads, tokens, 1), "bfloat16")
        if not np.isfinite(units).all():
            raise InvalidObject(f"{name} has scales that are not finite")
        channels = np.empty((layers * heads * dim, tokens), np.int16)
        for at in range(0, len(channels), _CHANNELS):
            number = at // _CHANNELS
            rows = [streams[f"{name}.thirds{number}"], streams[f"{name}.rest{number}"]]
            _decoded(rows, channels[at : at + _CHANNELS])
        channels += offsets.view(np.int8)[:, None]
        whole = channels.reshape(layers, heads, dim, tokens).transpose(0, 1, 3, 2)
        from_floats(whole * units, dtype, array)


def _names(array: str, shape: tuple[int, ...]) -> list[str]:
    count = -(-shape[0] * shape[1] * shape[3] // _CHANNELS)
    coded = [f"{array}.{kind}{number}" for number in range(count) for kind in ("thirds", "rest")]
    return [f"{array}.scales", f"{array}.offsets", *coded]


def _coded(numbers: npt.NDArray[np.int16]) -> tuple[bytes, bytes]:
    mean = np.abs(numbers).mean(axis=1) / 3
    sizes = np.rint(2 * np.log2(np.maximum(mean, 2.0**-20))) + UNIT_CLASS
    classes = np.clip(sizes, 0, CLASSES - 1).astype(np.uint8)
    coder = standard_tables().native
    thirds, rest = coder.encode(numbers, classes, *_sides(numbers.shape), 1)
    return thirds, rest


def _decoded(streams: list[Array], numbers: npt.NDArray[np.int16]) -> None:
    expected, steps, energy = _sides(numbers.shape)
    try:
        standard_tables().native.decode(streams, numbers, np.empty_like(expected), expected, steps, energy)
    except (ValueError, TypeError) as error:
        raise InvalidObject(f"the block's streams do not decode: {error}") from error


def _sides(
    shape: tuple[int, ...],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    expected = np.full(shape[0], _EXPECTED, np.uint8)
    return expected, np.zeros(shape[1], np.int8), np.zeros(shape[1], np.int8)
