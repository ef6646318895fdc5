"""lossless: byte planes compressed with zstd, bit-exact for every value, NaN payloads included.

Each number is rotated left by one bit, so that its exponent fills the top byte and its sign joins the
mantissa; then the bytes of equal rank are laid together. Exponents of neighbouring numbers are alike and
compress; mantissas hardly do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard

from retain.codecs.base import Array, Encoded, container
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Tokens

LEVEL = 3
_PLANE = "plane"


class Lossless:
    """One stream a byte plane: `k.plane0` (lowest byte) upwards."""

    name = "lossless"
    lossy = False

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
        streams: dict[str, Array] = {}
        for name, array in arrays.items():
            for rank, plane in enumerate(_planes(array)):
                streams[f"{name}.{_PLANE}{rank}"] = np.frombuffer(compressor.compress(plane.data), np.uint8)
        return Encoded(streams)

    def decode(
        self, streams: Mapping[str, Array], tokens: Tokens, header: BlockHeader, out: Mapping[str, Array]
    ) -> None:
        width = container(header.dtype).itemsize
        expected = {f"{name}.{_PLANE}{rank}" for name in out for rank in range(width)}
        if streams.keys() != expected:
            raise InvalidObject(
                f"lossless block holds streams {sorted(streams)}, expected {sorted(expected)}"
            )
        decompressor = zstandard.ZstdDecompressor()
        for name, array in out.items():
            unsigned = np.dtype(f"u{width}")
            turned = np.empty((array.size, width), np.uint8)
            for rank in range(width):
                turned[:, rank] = _plane(decompressor, streams[f"{name}.{_PLANE}{rank}"], array.size, name)
            numbers = turned.reshape(-1).view(unsigned)
            np.copyto(
                array.view(unsigned), ((numbers >> 1) | (numbers << (8 * width - 1))).reshape(array.shape)
            )


def _planes(array: Array) -> list[Array]:
    width = array.dtype.itemsize
    numbers = np.ascontiguousarray(array).view(np.dtype(f"u{width}")).reshape(-1)
    turned = ((numbers << 1) | (numbers >> (8 * width - 1))).view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(turned[:, rank]) for rank in range(width)]


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
