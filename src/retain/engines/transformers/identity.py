"""Which model a live torch model is: its spec, from its config and the parameters it computes with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from retain.errors import UnsupportedModel
from retain.fingerprint import kin, sample_positions, variant
from retain.geometry import layers_of, text_config
from retain.identity import Field, digest
from retain.model import ModelSpec
from retain.weights import Indices, Values

ENGINE = "transformers"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ADAPTER = re.compile(r"\.lora_\w+(\.|$)")
_WRAPPERS = re.compile(r"^(_orig_mod\.|module\.|base_model\.model\.)+|(?<=\.)(base_layer\.|_orig_mod\.)")
_WORKERS = 4
_LOOKS = 4
"""Values of every tensor that a WeightWatch looks at."""
_WATCHED = MappingProxyType(
    {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
)


@dataclass(frozen=True)
class WeightDigests:
    """What the weights of a model are: kin and the digest of all their bytes."""

    kin: bytes
    weights: bytes


def spec_of(model: nn.Module, name: str | None = None, digests: WeightDigests | None = None) -> ModelSpec:
    """The spec of a live model, as its DynamicCache holds the KV.

    Every parameter and kept buffer is read, so a merged adapter or an updated weight gives another variant;
    unmerged LoRA adapters that are switched on give the spec's adapter. `digests` are those of an unchanged
    model that were computed before. Raises UnsupportedModel.
    """
    config = _config(model)
    settings = text_config(config)
    known = digests or weight_digests(model)
    dtype = str(_compute_dtype(model)).removeprefix("torch.")
    return ModelSpec(
        name=name
        or PurePath(str(getattr(_config_object(model), "_name_or_path", ""))).name
        or settings["model_type"],
        architecture=settings["model_type"],
        layers=layers_of(config),
        dtype=dtype,
        kin=known.kin,
        variant=variant(known.weights, dtype, ENGINE, numeric_class(model)),
        adapter=adapter_of(model),
    )


def weight_digests(model: nn.Module) -> WeightDigests:
    """Kin and content digest of a live model's own weights, adapters left out."""
    tensors = dict(_own_tensors(model))
    weights = {name: _LiveWeight(tensor) for name, tensor in tensors.items()}
    return WeightDigests(kin(_config(model), weights), content_digest(tensors))


def content_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A digest of tensors: name, dtype, shape and every byte of each.

    Each tensor is hashed with XXH3-128 and the list of hashes with SHA-256. It is there to tell weights apart
    that people made, for which 128 well-mixed bits are plenty, at the speed of memory: 9 times that of
    SHA-256, which would add 10 seconds for each 16 GB to every attach. It is no defence against someone who
    crafts weights to collide; who can load weights into an engine can make it say anything.
    """
    items = sorted(tensors.items())
    with ThreadPoolExecutor(_WORKERS) as pool:
        hashes = list(pool.map(lambda item: _hash(*item), items))
    return digest(
        "retain/weights",
        [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), value)
            for (name, tensor), value in zip(items, hashes, strict=True)
        ],
    )


class WeightWatch:
    """Notices that weights were changed, in well under a millisecond: it looks at a few values of every
    tensor.

    torch counts writes to a parameter, but none through `parameter.data`, as many a script merges adapters.
    Any dense change is seen; a write of a few single values through `.data` is not. Weights on other devices
    than the CPU are not looked at, for that would wait for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._looked: list[tuple[npt.NDArray[Any], Indices]] = []
        for parameter in model.parameters():
            tensor = parameter.detach()
            if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _WATCHED:
                # The views also keep the memory from being given to other weights at the same address.
                values = tensor.reshape(-1).view(_WATCHED[tensor.dtype]).numpy()
                rows, columns = sample_positions(tuple(tensor.shape))
                flat = (rows * tensor.shape[-1] + columns)[:: rows.size // _LOOKS] if rows.size else rows
                self._looked.append((values, flat))

    def stamp(self) -> int:
        """Another number after a change, within this process."""
        return hash(b"".join([values[places].tobytes() for values, places in self._looked]))


def adapter_of(model: nn.Module) -> bytes | None:
    """The digest of the unmerged LoRA adapters that are switched on: their tensors and factors. None without
    any."""
    parts: dict[str, torch.Tensor] = {}
    factors: list[Field] = []
    for name, module in model.named_modules():
        active = _active_adapters(module)
        if active is None:
            continue
        place = _WRAPPERS.sub("", name)
        scaling = getattr(module, "scaling", {})
        for adapter in active:
            held = False
            for kind, tensor in _adapter_tensors(module, adapter):
                parts[f"{place}.{kind}"] = tensor
                held = True
            if held:
                factor = scaling.get(adapter, 1.0) if isinstance(scaling, Mapping) else scaling
                factors.append((place, repr(float(factor))))
    if not parts:
        return None
    return digest("retain/adapter", content_digest(parts), sorted(map(repr, factors)))


def _active_adapters(module: nn.Module) -> list[str] | None:
    """The adapters a layer adds to its output; None for a layer that has none, or adds none."""
    if (
        not hasattr(module, "lora_A")
        or getattr(module, "disable_adapters", False)
        or getattr(module, "merged", False)
    ):
        return None
    names = list(module.lora_A) if isinstance(module.lora_A, (nn.ModuleDict, nn.ParameterDict)) else [""]
    active = getattr(module, "active_adapters", names)
    chosen = [active] if isinstance(active, str) else list(active)
    return sorted(name for name in chosen if name in names) or None


def _adapter_tensors(module: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    # A layer may hold several adapters: PEFT keeps each kind (lora_A, lora_B, ...) as a dict by adapter name.
    for name, tensor in module.named_parameters():
        kind, _, rest = name.partition(".")
        if not kind.startswith("lora_"):
            continue
        owner, _, inner = rest.partition(".")
        if not adapter or owner == adapter or rest == adapter:
            yield f"{kind}.{inner}" if adapter else name, tensor.detach()


def _own_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and kept buffers of the model itself, by Hugging Face name; tied ones once."""
    for name, parameter in model.named_parameters():
        if not _ADAPTER.search(name):
            yield _WRAPPERS.sub("", name), _present(name, parameter)
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=place, recurse=False):
            kept = name.rpartition(".")[2] not in module._non_persistent_buffers_set
            if kept and not _ADAPTER.search(name):
                yield _WRAPPERS.sub("", name), _present(name, buffer)


def _present(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise UnsupportedModel(
            f"the weight {name} is not in memory (device meta), so the model cannot be told apart"
        )
    return tensor.detach()


def _hash(name: str, tensor: torch.Tensor) -> bytes:
    try:
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"the bytes of the weight {name} ({type(tensor).__name__}) cannot be read"
        ) from error
    return xxhash.xxh3_128_digest(data.data)


@dataclass(frozen=True)
class _LiveWeight:
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def sample(self, rows: Indices, columns: Indices) -> Values:
        tensor = self.tensor
        if tensor.dtype not in _FLOATS and tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)
        lines = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        device = tensor.device
        taken = lines[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)]
        return np.asarray(taken.to("cpu", torch.float64).numpy(), np.float64)


def _config_object(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise UnsupportedModel(f"a {type(model).__name__} has no config to read the layers of its KV from")
    return config


def _config(model: nn.Module) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = _config_object(model).to_dict()
    return settings


def _compute_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.dtype in _FLOATS:
            return parameter.dtype
    raise UnsupportedModel(
        f"a {type(model).__name__} has no floating-point weights, so the dtype of its KV is unknown"
    )


def numeric_class(model: nn.Module) -> str:
    """Whether a model computes with floats, or with weights quantised at run time."""
    return "float" if all(parameter.dtype in _FLOATS for parameter in model.parameters()) else "quantised"
