"""Which model a GGUF file is when llama.cpp runs it: its spec, with kin equal to that of the same weights in
any other format."""

from __future__ import annotations

from pathlib import Path

from retain.digests import DigestCache, content_of, identity_of, settled
from retain.fingerprint import kin_of_files, variant
from retain.geometry import layers_of
from retain.gguf import GgufFile
from retain.model import ModelSpec

ENGINE = "llamacpp"
_FLOATS = frozenset({0, 1, 30})
"""ggml's types that hold numbers as floats: F32, F16, BF16. With all others llama.cpp quantises activations
too."""


def spec_of(gguf: GgufFile, name: str, dtype: str, known: DigestCache) -> ModelSpec:
    """The spec of a GGUF file with KV of `dtype`. Raises UnsupportedModel."""
    config = gguf.config()
    return ModelSpec(
        name=name,
        architecture=str(config["model_type"]),
        layers=layers_of(config),
        dtype=dtype,
        kin=kin_of(gguf.path, known),
        variant=variant(content_of(gguf.path, known), dtype, ENGINE, numeric_class(gguf)),
    )


def kin_of(path: Path, known: DigestCache) -> bytes:
    """The kin of a file, remembered by the file's identity."""
    identity = identity_of((path,), "kin")
    trusted = settled((path,))
    kept = known.get(identity)
    if kept is not None and "kin" in kept:
        return kept["kin"]
    found = kin_of_files(path)
    if trusted and identity == identity_of((path,), "kin"):
        known.put(identity, {"kin": found})
    return found


def numeric_class(gguf: GgufFile) -> str:
    """Whether llama.cpp computes with the floats of the file, or quantises at run time."""
    kinds = {tensor.quantisation for tensor in gguf.tensors().values()}
    return "float" if kinds <= _FLOATS else "quantised"
