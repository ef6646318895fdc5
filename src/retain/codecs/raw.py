"""raw: the numbers as they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from retain.codecs.base import Array, Encoded
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Tokens


class Raw:
    """Streams are the arrays themselves."""

    name = "raw"
    lossy = False

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        return Encoded(dict(arrays))

    def decode(
        self, streams: Mapping[str, Array], tokens: Tokens, header: BlockHeader, out: Mapping[str, Array]
    ) -> None:
        if streams.keys() != out.keys():
            raise InvalidObject(f"raw block holds tensors {sorted(streams)}, expected {sorted(out)}")
        for name, array in out.items():
            if streams[name].shape != array.shape or streams[name].dtype != array.dtype:
                raise InvalidObject(
                    f"raw tensor {name} has shape {streams[name].shape}, expected {array.shape}"
                )
            np.copyto(array, streams[name])
