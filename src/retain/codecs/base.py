"""The Codec contract: how a block's numbers are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from retain.header import BlockHeader
from retain.identity import Tokens

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Encoded:
    """A block's streams by tensor name, in reading order, and what the decoder must know beside them.

    `exact` says whether they decode to the very numbers that were encoded.
    """

    streams: Mapping[str, Array]
    parameters: str = ""
    exact: bool = True


class Codec(Protocol):
    """Turns a block's arrays into streams and back. Stateless and safe to call from several threads."""

    @property
    def name(self) -> str:
        """The codec's word in object names and headers: [a-z0-9-]+."""

    @property
    def lossy(self) -> bool:
        """Whether decoded numbers may differ from the encoded ones."""

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        """The streams of a raw block's arrays (each `[layers, heads, tokens, head_dim]`).

        bfloat16 arrays come as uint16. May return views of its input.
        """

    def decode(
        self, streams: Mapping[str, Array], tokens: Tokens, header: BlockHeader, out: Mapping[str, Array]
    ) -> None:
        """Fill the arrays of `out` from the streams of an object with this header.

        The streams' checksums have been verified, but their content is still untrusted: raises InvalidObject
        when they do not decode to exactly the shapes of `out`, and never writes outside them.
        """


def container(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds KV of the given dtype."""
    return np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype])
