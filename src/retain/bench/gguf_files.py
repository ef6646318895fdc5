"""GGUF files for benches: a quantised model with its weights as plain float32, every other fact kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from retain.digests import DigestCache, cache_directory, content_of
from retain.models import Source, find


def float_gguf(source: Source) -> Source:
    """The same model in float32, made once and kept in the cache directory: what float engines compute with.

    llama.cpp quantises activations where weights are quantised; with these weights it computes as others do.
    """
    place = cache_directory()
    content = content_of(source.path, DigestCache(place / "digests.json"))
    target = place / "models" / f"{source.name}-{content[:12].hex()}.f32.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "made.gguf"
            _write(source.path, made)
            os.replace(made, target)
    return find(str(target))


def _write(source: Path, target: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value: Any = field.contents()
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(each) for each in reversed(tensor.shape))
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
