"""The Codec contract: how a block's numbers are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Codec(Protocol):
    """Turns a block's arrays into streams and back. Stateless and safe to call from several threads."""

    @property
    def name(self) -> str:
        """The codec's word in object names and headers: [a-z0-9-]+."""

    @property
    def lossy(self) -> bool:
        """Whether decoded numbers may differ from the encoded ones."""

    def encode(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
        """The streams of `arrays` (each `[layers, heads, tokens, head_dim]`), by tensor name, in reading
        order.

        `dtype` is the KV's dtype by name; bfloat16 arrays come as uint16. May return views of its input.
        """

    def decode(self, streams: Mapping[str, Array], dtype: str, out: Mapping[str, Array]) -> None:
        """Fill the arrays of `out` from `streams`.

        The streams' checksums have been verified, but their content is still untrusted: raises InvalidObject
        when they do not decode to exactly the shapes of `out`, and never writes outside them.
        """


def container(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds KV of the given dtype."""
    return np.dtype({"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype])
