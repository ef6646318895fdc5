"""GGUF files: settings as a transformers config, tensors by Hugging Face name, row order and value.

Only the header is read when a file is opened; tensors are memory-mapped, and dequantised when their values
are asked for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from retain.errors import UnsupportedModel
from retain.geometry import number
from retain.gguf_header import block_of, dequantised, read_header


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp's converter changes a family: names, the order of the rows of Q and K, and offset
    norms."""

    config: Callable[[GgufFile], dict[str, Any]]
    names: Mapping[str, str]
    interleaved: bool
    norm_offset: float


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file as Hugging Face holds it. `shape` is in row-major order."""

    shape: tuple[int, ...]
    quantisation: int
    data: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64] | None
    offset: float

    def sample(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The values at these rows and columns; a vector is one row, and of more dimensions the last are
        columns."""
        stored = rows if self.rows is None else self.rows[rows]
        width, size = block_of(self.quantisation)
        lines = self.data.reshape(-1, self._columns // width, size)
        blocks = np.ascontiguousarray(lines[stored, columns // width])
        values = dequantised(blocks, self.quantisation)[np.arange(rows.size), columns % width]
        return values.astype(np.float64) - self.offset

    def read(self) -> npt.NDArray[np.float32]:
        """All values, dequantised."""
        width, size = block_of(self.quantisation)
        lines = self.data.reshape(-1, self._columns // width * size)
        values = dequantised(lines if self.rows is None else lines[self.rows], self.quantisation)
        if self.offset:
            values = values - np.float32(self.offset)
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)

    @property
    def _columns(self) -> int:
        return self.shape[-1]


class GgufFile:
    """An opened GGUF file. Raises UnsupportedModel for a file that is none, is cut off, or has a newer
    version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
            metadata, stored = read_header(self._data)
        except (ValueError, TypeError, struct.error, ArithmeticError) as error:
            raise UnsupportedModel(
                f"{path.name} is not a whole GGUF file of version 2 or 3: {error}"
            ) from error
        self.metadata: Mapping[str, Any] = metadata
        self._stored = stored

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the family."""
        return str(self.metadata.get("general.architecture", ""))

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of the family: `setting("block_count")` is the value of `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def config(self) -> dict[str, Any]:
        """The settings as a transformers config. Raises UnsupportedModel naming the family or the setting."""
        return self._known().config(self)

    def tensors(self) -> dict[str, GgufTensor]:
        """The tensors by Hugging Face name. Raises UnsupportedModel naming a tensor that has no known
        counterpart."""
        family = self._known()
        heads = _heads(self)
        found = {}
        for name, stored in self._stored.items():
            if name == _FREQUENCIES:
                continue  # a setting: see `_scaled`
            target = _hugging_face_name(name, family.names)
            if target is None:
                raise UnsupportedModel(
                    f"{self.path.name} has a tensor {name!r} that Retain cannot place in a "
                    f"{self.architecture} model; use the model's safetensors directory"
                )
            data = self._bytes(name)
            rows = None
            part = name.split(".")[2] if name.startswith("blk.") else ""
            if family.interleaved and part in heads:
                count = heads[part]
                if count < 1 or stored.shape[0] % (2 * count):
                    raise UnsupportedModel(
                        f"{self.path.name} has {stored.shape[0]} rows in {name}, not those of {count} heads"
                    )
                rows = _half_split_rows(stored.shape[0], count)
            shift = family.norm_offset if name.endswith("norm.weight") else 0.0
            if rows is not None and len(stored.shape) == 1:
                raise UnsupportedModel(
                    f"{self.path.name} has {name!r}: biases of Q and K cannot be read from a GGUF file"
                )
            found[target] = GgufTensor(stored.shape, stored.quantisation, data, rows, shift)
        return found

    @property
    def interleaved(self) -> bool:
        """Whether llama.cpp rotates neighbouring numbers of a head where Hugging Face rotates its halves."""
        return self._known().interleaved

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        stored = self._stored[name]
        data = self._data[stored.start : stored.start + stored.size]
        if data.size != stored.size:
            raise UnsupportedModel(
                f"{self.path.name} is cut off: tensor {name} ends behind the end of the file"
            )
        return data

    def _known(self) -> Architecture:
        family = _ARCHITECTURES.get(self.architecture)
        if family is None:
            raise UnsupportedModel(
                f"GGUF files of the architecture {self.architecture!r} cannot be read; known are "
                f"{', '.join(sorted(_ARCHITECTURES))}. Use the model's safetensors directory instead"
            )
        return family


def _heads(file: GgufFile) -> dict[str, int]:
    queries = _count(file, "attention.head_count")
    return {"attn_q": queries, "attn_k": _count(file, "attention.head_count_kv", queries)}


def _half_split_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    # llama.cpp's converter interleaves the rows of Q and K: stored[2 * i + h] = row[h * half + i] within each
    # head.
    half = rows // heads // 2
    return np.arange(rows, dtype=np.int64).reshape(heads, half, 2).swapaxes(1, 2).reshape(rows)


def _hugging_face_name(name: str, names: Mapping[str, str]) -> str | None:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer:
        target = names.get(layer[2])
        return None if target is None else f"model.layers.{layer[1]}.{target}.{layer[3]}"
    return _OUTSIDE.get(name)


def _base_config(file: GgufFile, model_type: str) -> dict[str, Any]:
    names = set(file._stored)
    heads = _count(file, "attention.head_count")
    hidden = _count(file, "embedding_length")
    if "token_embd.weight" not in names:
        raise UnsupportedModel(f"{file.path.name} has no tensor token_embd.weight: it holds no whole model")
    size = _count(file, "attention.key_length", hidden // heads)
    if file.setting("attention.value_length", size) != size:
        raise UnsupportedModel(
            f"{file.path.name} has heads of other sizes for K than for V, which is not supported"
        )
    config = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": _count(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "vocab_size": file._stored["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in names,
    }
    for token, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        identifier = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if identifier is not None:
            config[f"{token}_token_id"] = int(identifier)
    return config


def _qwen2_config(file: GgufFile) -> dict[str, Any]:
    return {
        **_base_config(file, "qwen2"),
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(file),
    }


def _qwen3_config(file: GgufFile) -> dict[str, Any]:
    return {
        **_base_config(file, "qwen3"),
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_parameters": _rope(file),
    }


def _llama_config(file: GgufFile) -> dict[str, Any]:
    config = _base_config(file, "llama")
    turned = _count(file, "rope.dimension_count", config["head_dim"])
    rope = _rope(file)
    if turned != config["head_dim"]:
        rope["partial_rotary_factor"] = turned / config["head_dim"]
    return {
        **config,
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_v.bias" in file._stored,
        "mlp_bias": "blk.0.ffn_up.bias" in file._stored,
        "rope_parameters": rope,
    }


def _gemma3_config(file: GgufFile) -> dict[str, Any]:
    config = _base_config(file, "gemma3_text")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    pattern = file.setting("attention.sliding_window_pattern", 6)
    if isinstance(pattern, int):
        pattern = [bool((index + 1) % pattern) for index in range(layers)]
    local = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 1e4)}
    # llama.cpp scales by the size of a head, and in the 27B model, known by its 62 layers, by hidden size
    # over heads.
    scale = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    return {
        **config,
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": _count(file, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in pattern],
        "final_logit_softcapping": _number(file, "final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"sliding_attention": local, "full_attention": _rope(file)},
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    rule = file.setting("rope.scaling.type", "none")
    theta = _number(file, "rope.freq_base", 1e4)
    if _FREQUENCIES in file._stored:
        return {**_scaled(file, theta), "rope_theta": theta}
    if rule == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if rule == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": _number(file, "rope.scaling.factor"),
            "original_max_position_embeddings": _count(file, "rope.scaling.original_context_length"),
        }
    if rule == "linear":
        factor = _number(file, "rope.scaling.factor", file.setting("rope.scale_linear"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise UnsupportedModel(
        f"{file.path.name} scales RoPE by the rule {rule!r} (rope.scaling.type), which Retain cannot read "
        "from a GGUF file; use the model's safetensors directory"
    )


def _scaled(file: GgufFile, theta: float) -> dict[str, Any]:
    """Llama 3's rule, of which a GGUF file holds what each frequency is divided by.

    All its models have the same bounds; what the lowest frequency is divided by is the rule's factor.
    """
    stored = file._stored[_FREQUENCIES]
    lines = file._bytes(_FREQUENCIES).reshape(1, -1)
    kept = dequantised(lines, stored.quantisation).reshape(-1).astype(np.float64)
    factor, (low, high, original) = float(kept.max(initial=1.0)), _LLAMA3
    lengths = 2 * np.pi * theta ** (np.arange(kept.size) / max(kept.size, 1))
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(lengths > original / low, factor, between)
    expected[lengths < original / high] = 1.0
    if not np.allclose(kept, expected, rtol=1e-5):
        raise UnsupportedModel(
            f"{file.path.name} scales RoPE by factors ({_FREQUENCIES}) that are not those of Llama 3; use "
            "the model's safetensors directory"
        )
    return {
        "rope_type": "llama3",
        "factor": number(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original),
    }


def _count(file: GgufFile, name: str, default: int | None = None) -> int:
    value = file.setting(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(
            f"{file.path.name} must state {file.architecture}.{name} as one number above zero, not {value!r}"
        )
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    value = file.setting(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedModel(
            f"{file.path.name} must state {file.architecture}.{name} as a number, not {value!r}"
        )
    return number(value)


_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = (1.0, 4.0, 8192.0)
"""Of Llama 3.1 and later: `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`."""

_OUTSIDE = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm"}
_QWEN3 = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = {
    **_ATTENTION,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES = MappingProxyType(
    {
        "llama": Architecture(_llama_config, MappingProxyType(_LLAMA), interleaved=True, norm_offset=0.0),
        "qwen2": Architecture(_qwen2_config, MappingProxyType(_LLAMA), interleaved=False, norm_offset=0.0),
        "qwen3": Architecture(_qwen3_config, MappingProxyType(_QWEN3), interleaved=False, norm_offset=0.0),
        "gemma3": Architecture(_gemma3_config, MappingProxyType(_GEMMA3), interleaved=False, norm_offset=1.0),
    }
)
