"""The header of a GGUF file and its quantised numbers: what is the same for every model family."""

from __future__ import annotations

import importlib
import math
import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from retain.errors import MissingDependency, UnsupportedModel

Array = npt.NDArray[Any]

_SCALARS = MappingProxyType(
    {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }
)
_STRING, _ARRAY = 8, 9
_F32, _F16, _BF16 = 0, 1, 30
_PLAIN = MappingProxyType({_F32: 4, _F16: 2, _BF16: 2})
_MAX_RANK = 4


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the file, in bytes, and how. `shape` is in row-major order."""

    shape: tuple[int, ...]
    quantisation: int
    start: int
    size: int


def read_header(data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The settings and the tensors of a GGUF file of version 2 or 3; of lists of texts only their lengths.

    Raises ValueError, TypeError, ArithmeticError or struct.error where the header is damaged.
    """
    return _Reader(data).header()


def block_of(kind: int) -> tuple[int, int]:
    """Numbers and bytes in one block of a quantisation."""
    if kind in _PLAIN:
        return 1, _PLAIN[kind]
    constants = _package("constants")
    try:
        width, size = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"the quantisation with number {kind} is not known to the gguf package"
        ) from error
    return int(width), int(size)


def dequantised(data: Array, kind: int) -> npt.NDArray[np.float32]:
    """The numbers in rows of blocks `[rows, bytes]`: `[rows, numbers]`."""
    if kind == _F32:
        return data.view("<f4")
    if kind == _F16:
        return data.view("<f2").astype(np.float32)
    if kind == _BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    constants, quants = _package("constants"), _package("quants")
    values = quants.dequantize(np.ascontiguousarray(data), constants.GGMLQuantizationType(kind))
    return np.asarray(values, np.float32)


class _Reader:
    """Walks the header. Lists of texts, the vocabulary and its merges, are counted and skipped."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self._view = memoryview(data.data)
        self._at = 0

    def header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if bytes(self._view[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, settings = struct.unpack_from("<IQQ", self._view, 4)
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")
        self._at = 24
        metadata = {}
        for _ in range(settings):
            name = self._text()
            metadata[name] = self._value(self._unpack("<I"))
        infos = [self._tensor() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return metadata, {
            name: Stored(shape, kind, start + offset, _size(name, shape, kind))
            for name, shape, kind, offset in infos
        }

    def _unpack(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._view, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _text(self) -> str:
        length = self._unpack("<Q")
        if length > len(self._view) - self._at:
            raise ValueError("a text in it is longer than the file")
        text = bytes(self._view[self._at : self._at + length]).decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, count = self._unpack("<I"), self._unpack("<Q")
            if inner == _STRING:
                self._skip_texts(count)
                return count
            return self._numbers(inner, count).tolist()
        return self._numbers(kind, 1).item()

    def _numbers(self, kind: int, count: int) -> Array:
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        values = np.frombuffer(self._view, _SCALARS[kind], count, self._at)
        self._at += values.nbytes
        return values

    def _skip_texts(self, count: int) -> None:
        view, at, unpack = self._view, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(view, at)[0]
        self._at = at

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        rank = self._unpack("<I")
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(rank))
        return name, shape[::-1], self._unpack("<I"), self._unpack("<Q")


def _size(name: str, shape: tuple[int, ...], kind: int) -> int:
    width, size = block_of(kind)
    if shape[-1] % width:
        raise ValueError(
            f"the rows of tensor {name} have {shape[-1]} numbers, no multiple of a block of {width}"
        )
    return math.prod(shape) // width * size


def _package(module: str) -> Any:
    try:
        return importlib.import_module(f"gguf.{module}")
    except ImportError as error:
        raise MissingDependency(
            "reading a quantised GGUF file needs the gguf package: pip install 'retain[transformers]'"
        ) from error
