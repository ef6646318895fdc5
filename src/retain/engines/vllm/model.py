"""Which model a vLLM engine runs: its ModelSpec, the part that a rank holds, and adapters by content."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import xxhash

from retain.digests import DigestCache, identity_of, settled
from retain.errors import UnsupportedModel
from retain.fingerprint import kin, variant
from retain.geometry import layers_of, text_config
from retain.identity import digest
from retain.model import DTYPES, LayerSpec, ModelSpec, Slice
from retain.weights import ModelFiles, open_model

log = logging.getLogger("vllm.retain")

ENGINE = "vllm"
_FILE_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "gguf", "runai_streamer")
_CHUNK_BYTES = 1 << 24


def layers(vllm_config: Any) -> tuple[LayerSpec, ...]:
    """The layers of the engine's model, as its pages hold them. Raises UnsupportedModel."""
    return layers_of(_config(vllm_config), latent=bool(vllm_config.model_config.use_mla))


def dtype(vllm_config: Any) -> str:
    """The dtype of the engine's KV, by name. Raises UnsupportedModel for a quantised cache."""
    stated = str(vllm_config.cache_config.cache_dtype)
    name = str(vllm_config.model_config.dtype if stated == "auto" else stated).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(
            f"KV of dtype {name} (--kv-cache-dtype) has scales that are not kept with it, so it cannot "
            f"be used again; known are {', '.join(DTYPES)}"
        )
    return name


def spec(vllm_config: Any, digests: DigestCache | None = None) -> ModelSpec:
    """The spec of the engine's model. Reads the weights' files, unless they were read before.

    Raises UnsupportedModel.
    """
    model = vllm_config.model_config
    kind = str(vllm_config.load_config.load_format)
    if kind not in _FILE_FORMATS:
        raise UnsupportedModel(
            f"weights loaded by --load-format {kind} cannot be told apart by their files; known are "
            f"{', '.join(_FILE_FORMATS)}"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise UnsupportedModel(
            "an engine whose weights are replaced while it runs (weight_transfer_config) makes KV that its "
            "files do not tell apart"
        )
    config = _config(vllm_config)
    files = open_model(_directory(model))
    known = digests or DigestCache()
    name = dtype(vllm_config)
    return ModelSpec(
        name=PurePath(str(model.model)).name,
        architecture=text_config(config)["model_type"],
        layers=layers(vllm_config),
        dtype=name,
        kin=kin(config, files.weights),
        variant=variant(
            digest("retain/vllm-weights", _weights_digest(files, known), _settings(vllm_config)),
            name,
            ENGINE,
            "float" if model.quantization is None else "quantised",
        ),
    )


def rank_slice(spec_layers: tuple[LayerSpec, ...], held: range, rank: int, ranks: int) -> tuple[Slice, bool]:
    """What tensor-parallel rank `rank` of `ranks` holds of the layers `held`, and whether it stores it.

    With more ranks than KV heads several ranks hold the same head; the first of them stores it. A latent is
    held by every rank and stored by the first. Raises UnsupportedModel where the heads do not divide evenly.
    """
    heads = {layer.heads for layer in spec_layers if layer.kind != "latent"}
    if not heads:
        return Slice(held.start, held.stop), rank == 0
    parts = {_share(count, rank, ranks) for count in heads}
    if len(parts) != 1:
        raise UnsupportedModel(
            f"layers of {', '.join(map(str, sorted(heads)))} KV heads are split in different ways over "
            f"{ranks} tensor-parallel ranks, which is not supported"
        )
    start, stop, whole, first = parts.pop()
    return Slice(held.start, held.stop, start, stop, whole), first


def _share(heads: int, rank: int, ranks: int) -> tuple[int, int, int, bool]:
    if heads % ranks == 0:
        return rank, rank + 1, ranks, True
    if ranks % heads == 0:
        copies = ranks // heads
        return rank // copies, rank // copies + 1, heads, rank % copies == 0
    raise UnsupportedModel(f"{heads} KV heads cannot be split over {ranks} tensor-parallel ranks evenly")


class Adapters:
    """LoRA adapters by the content of their files: two of one name are two, one under two names is one.

    An adapter whose files change after its first use is refused from then on, for vLLM may still hold the old
    weights.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[bytes, bytes] | None] = {}

    def digest(self, request: Any) -> bytes | None:
        """The digest of a LoRARequest's adapter; None where its content cannot be told."""
        name = (int(request.lora_int_id), str(request.lora_path))
        try:
            files = tuple(sorted(file for file in _adapter_path(name[1]).iterdir() if file.is_file()))
            state = identity_of(files)
            if name not in self._known:
                self._known[name] = (state, _content(files))
            kept = self._known[name]
            if kept is not None and (kept[0] != state or request.load_inplace):
                log.warning(
                    "the adapter %s changed after its first use: its KV is neither kept nor used", name[1]
                )
                self._known[name] = kept = None
        except OSError as error:
            if name not in self._known:
                log.warning(
                    "the adapter %s cannot be read, so its KV is neither kept nor used: %s", name[1], error
                )
            self._known[name] = kept = None
        return None if kept is None else kept[1]


def with_adapter(base: ModelSpec, adapter: bytes) -> ModelSpec:
    """The spec of a model with a LoRA adapter."""
    return replace(base, adapter=digest("retain/adapter", adapter))


def _config(vllm_config: Any) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = vllm_config.model_config.hf_config.to_dict()
    return settings


def _directory(model: Any) -> Path:
    path = Path(str(model.model)).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model.model), revision=model.revision, local_files_only=True))
    except Exception as error:
        raise UnsupportedModel(
            f"the files of the model {model.model!r} are not on this machine, so it cannot be told "
            f"apart: {error}"
        ) from error


def _settings(vllm_config: Any) -> list[str]:
    """What else changes the numbers of this engine's KV."""
    model = vllm_config.model_config
    settings = [str(model.quantization)]
    scalings = {layer.rope.scaling for layer in layers(vllm_config) if layer.rope is not None}
    if scalings & {"dynamic", "longrope"}:
        # vLLM picks these rules' factors by the longest sequence that it was started for.
        settings.append(str(model.max_model_len))
    return settings


def _weights_digest(files: ModelFiles, known: DigestCache) -> bytes:
    """The digest of all the weights' bytes. A file that was read before and not touched is not read again."""
    identity = identity_of(files.files, "file contents")
    trusted = settled(files.files)
    kept = known.get(identity)
    content = kept.get("content") if kept else None
    if content is None:
        started = time.perf_counter()
        content = _content(files.files)
        log.info(
            "read %d files of weights in %.1f s to tell them apart",
            len(files.files),
            time.perf_counter() - started,
        )
        if trusted and identity == identity_of(files.files, "file contents"):
            known.put(identity, {"content": content})
    return content


def _content(files: tuple[Path, ...]) -> bytes:
    """A digest of files by name and content. XXH3 tells apart what people made, at the speed of memory."""
    entries = []
    for file in files:
        hasher = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                hasher.update(chunk)
        entries.append((file.name, hasher.digest()))
    return digest("retain/contents", sorted(entries))


def _adapter_path(path: str) -> Path:
    given = Path(path).expanduser()
    if given.is_dir():
        return given
    from vllm.lora.utils import get_adapter_absolute_path

    return Path(get_adapter_absolute_path(path))
