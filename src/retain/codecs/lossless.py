"""lossless: bit-exact for every value, NaN payloads included.

Objects are written as `exponents` describes; those of earlier versions, without a word in their header's
`parameters`, are byte planes compressed with zstd: each number is rotated left by one bit, so that its
exponent fills the top byte and its sign joins the mantissa, and the bytes of equal rank are laid together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard

from retain.codecs import exponents
from retain.codecs.base import Array, Encoded, container
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Tokens

EXPONENTS = "exponents"
_PLANE = "plane"


class Lossless:
    """Streams as `exponents` writes them."""

    name = "lossless"
    lossy = False

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        return Encoded(exponents.encode(arrays, header.dtype), EXPONENTS)

    def decode(
        self, streams: Mapping[str, Array], tokens: Tokens, header: BlockHeader, out: Mapping[str, Array]
    ) -> None:
        if header.codec == self.name and not header.parameters:
            _decode_planes(streams, header.dtype, out)
        else:
            exponents.decode(streams, header.dtype, out)


def _decode_planes(streams: Mapping[str, Array], dtype: str, out: Mapping[str, Array]) -> None:
    """One stream a byte plane: `k.plane0` (lowest byte) upwards."""
    width = container(dtype).itemsize
    expected = {f"{name}.{_PLANE}{rank}" for name in out for rank in range(width)}
    if streams.keys() != expected:
        raise InvalidObject(f"lossless block holds streams {sorted(streams)}, expected {sorted(expected)}")
    decompressor = zstandard.ZstdDecompressor()
    for name, array in out.items():
        unsigned = np.dtype(f"u{width}")
        turned = np.empty((array.size, width), np.uint8)
        for rank in range(width):
            turned[:, rank] = _plane(decompressor, streams[f"{name}.{_PLANE}{rank}"], array.size, name)
        numbers = turned.reshape(-1).view(unsigned)
        np.copyto(array.view(unsigned), ((numbers >> 1) | (numbers << (8 * width - 1))).reshape(array.shape))


def _plane(decompressor: zstandard.ZstdDecompressor, stream: Array, size: int, name: str) -> Array:
    data = np.ascontiguousarray(stream, dtype=np.uint8).data
    try:
        if zstandard.frame_content_size(data) != size:
            raise InvalidObject(f"a byte plane of {name} does not hold {size} bytes")
        plane = np.frombuffer(decompressor.decompress(data, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise InvalidObject(f"a byte plane of {name} does not decompress: {error}") from error
    if plane.size != size:
        raise InvalidObject(f"a byte plane of {name} holds {plane.size} bytes, expected {size}")
    return plane
