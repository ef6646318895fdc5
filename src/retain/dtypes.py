"""Conversion of blocks between the dtypes that engines hold KV in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from retain.block import Block
from retain.codecs.base import Array
from retain.errors import ForeignObject


def converted(block: Block, dtype: str) -> Block:
    """The block in another dtype, in memory of its own; the block itself where it is in it already.

    Raises ForeignObject where a number does not fit: float16 ends at 65,504.
    """
    if block.header.dtype == dtype:
        return block
    arrays = {name: _array(array, block.header.dtype, dtype) for name, array in block.arrays.items()}
    return Block(replace(block.header, dtype=dtype), block.tokens, arrays)


def check_range(arrays: Mapping[str, Array], dtype: str) -> None:
    """Raise ForeignObject where a number that was made float16 did not fit."""
    if dtype == "float16" and not all(np.isfinite(array).all() for array in arrays.values()):
        raise ForeignObject("the block has numbers beyond 65,504, which float16 cannot hold")


def _array(array: Array, held: str, wanted: str) -> Array:
    if held == "bfloat16":
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if wanted == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        # To the nearest, ties to even.
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    with np.errstate(over="ignore"):
        found = array.astype(np.float16 if wanted == "float16" else np.float32)
    check_range({"": found}, wanted)
    return found
