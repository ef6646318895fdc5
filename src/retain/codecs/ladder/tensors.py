"""The file of a profile: a safetensors file that is written in one way only, and read without trust."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from retain.codecs.base import Array
from retain.errors import InvalidProfile

_DTYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32}
_WORDS = {np.dtype(dtype): word for word, dtype in _DTYPES.items()}


def to_file(metadata: Mapping[str, str], tensors: Mapping[str, Array]) -> bytes:
    """The bytes of a file that holds these: equal ones for equal content."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, array in tensors.items():
        document[name] = {
            "dtype": _WORDS[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return b"".join([struct.pack("<Q", len(text)), text, *(array.tobytes() for array in tensors.values())])


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def from_file(data: memoryview) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and tensors in a file's bytes. Raises InvalidProfile."""
    if len(data) < 8:
        raise InvalidProfile(f"the profile has {len(data)} bytes, too few for a header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(1 << 24, len(data) - 8):
        raise InvalidProfile(f"the profile claims a header of {length} bytes")
    try:
        document = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in document.items()}
    except (msgspec.MsgspecError, KeyError, RecursionError) as error:
        raise InvalidProfile(f"the profile's header cannot be read: {error}") from error
    body = np.frombuffer(data, np.uint8, offset=8 + length)
    tensors = {}
    at = 0
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES or any(size < 0 for size in entry.shape):
            raise InvalidProfile(
                f"tensor {name[:40]!r} of the profile is {entry.dtype[:10]} {entry.shape[:8]}"
            )
        size = math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize
        if entry.data_offsets != (at, at + size) or at + size > body.size:
            raise InvalidProfile(f"tensor {name[:40]!r} of the profile does not lie where its shape says")
        # Copied where it lies unaligned: files are made so that tensors of one size follow each other.
        tensors[name] = _aligned(body[at : at + size], _DTYPES[entry.dtype]).reshape(entry.shape)
        at += size
    if at != body.size:
        raise InvalidProfile(f"the profile has {body.size - at} bytes behind its last tensor")
    return metadata, tensors


def _aligned(data: Array, dtype: Any) -> Array:
    array = np.empty(data.size // np.dtype(dtype).itemsize, dtype)
    array.view(np.uint8)[:] = data
    return array
