"""Weights: the tensors of a model on disk by Hugging Face name, read through memory maps without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from retain.errors import UnsupportedModel
from retain.gguf import GgufFile

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
_DTYPES = MappingProxyType(
    {
        name: f"<{name[0].lower()}{int(name[1:]) // 8}"
        for name in ["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"]
    }
    | {"BF16": "<u2", "BOOL": "<u1", "F8_E4M3": "<u1", "F8_E5M2": "<u1"}
)
"""numpy's dtypes for those of safetensors; those that numpy lacks are read as their bits."""


class Weight(Protocol):
    """A tensor of weights that can be looked into without reading all of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in row-major order."""

    def sample(self, rows: Indices, columns: Indices) -> Values:
        """The values at these rows and columns. A vector is one row; the last dimension are the columns."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: its config, its weights by name, and the files that hold them."""

    config: Mapping[str, Any]
    weights: Mapping[str, Weight]
    files: tuple[Path, ...]


def open_model(path: Path) -> ModelFiles:
    """The model in a directory with config.json and safetensors files, or in a GGUF file.

    Reads headers only. Raises UnsupportedModel with the file and what is wrong with it.
    """
    if path.is_dir():
        files = weight_files(path)
        weights: dict[str, Weight] = {}
        for file in files:
            weights.update(_safetensors(file))
        return ModelFiles(_json(path / "config.json"), weights, files)
    gguf = GgufFile(path)
    return ModelFiles(gguf.config(), gguf.tensors(), (path,))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model's directory, as its index names them."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        files = tuple(directory / Path(str(name)).name for name in names)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UnsupportedModel(f"{directory} lacks {', '.join(missing)}, which its index names")
    else:
        files = tuple(sorted(directory.glob("model*.safetensors")))
    if not files:
        raise UnsupportedModel(
            f"{directory} has no model.safetensors; pickled weights (.bin, .pt) are not read: "
            "save the model as safetensors"
        )
    return files


@dataclass(frozen=True)
class _SafetensorsTensor:
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[Any]

    def sample(self, rows: Indices, columns: Indices) -> Values:
        lines = self.data.reshape(-1, self.shape[-1] if self.shape else 1)
        values = lines[rows, columns]
        if self.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return values.astype(np.float64)


def _safetensors(path: Path) -> dict[str, Weight]:
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    try:
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        if length > min(_MAX_HEADER_BYTES, data.size - 8):
            raise ValueError(f"its header claims {length} bytes")
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        return {name: _tensor(data, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not a whole safetensors file: {error}") from error


def _tensor(data: npt.NDArray[np.uint8], base: int, name: str, entry: Any) -> Weight:
    kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, stop = (base + int(offset) for offset in entry["data_offsets"])
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name} has the unknown dtype {kind}")
    if any(size < 0 for size in shape) or not base <= start <= stop <= data.size:
        raise ValueError(f"tensor {name} ends behind the end of the file")
    if stop - start != math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize:
        raise ValueError(f"tensor {name} has {stop - start} bytes, not those of its shape")
    values = data[start:stop]
    # A header's length need not be a multiple of eight; numpy reads unaligned views, only more slowly.
    return _SafetensorsTensor(shape, kind, values.view(_DTYPES[kind]))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return document
