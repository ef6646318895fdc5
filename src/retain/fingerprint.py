"""Fingerprints: kin, for the same weights in any format, and variant, for these very weights.

The kin of a model is a digest of its config in canonical form and of 64 values of every weight tensor, spread
over rows and columns, by Hugging Face names and row order, dequantised and rounded to bfloat16. The variant
is a digest of all the bytes. A sparse change of weights can leave the kin as it was; it always changes the
variant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from retain.errors import UnsupportedModel
from retain.geometry import layers_of, number, text_config
from retain.identity import Field, digest
from retain.model import DTYPES, LayerSpec, runs
from retain.weights import Indices, Values, Weight, open_model

SAMPLES = 64
"""Values taken of every weight tensor."""

NUMERIC_CLASSES = ("float", "quantised")
"""What an engine computes with: floats, or weights or activations quantised at run time."""

_SPREAD = 2654435769  # 2**32 over the golden ratio: multiples of it spread evenly over any number of columns
_TWINS = MappingProxyType(
    {"mistral": "llama"}
)  # families that differ in nothing but the geometry of their layers
_UNIT_NORMS = frozenset({"gemma", "gemma2", "gemma3_text"})  # families whose norms multiply by 1 + weight

_MIXTRAL = MappingProxyType({"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})  # names on disk alone
_SYNONYMS = MappingProxyType({"hidden_activation": "hidden_act", "num_experts": "num_local_experts"})
# fmt: off
_GEOMETRY = frozenset({
    "head_dim", "num_key_value_heads", "num_hidden_layers", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "rope_parameters", "rope_scaling",
    "rope_theta", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "partial_rotary_factor",
    "no_rope_layers", "no_rope_layer_interval", "max_position_embeddings", "original_max_position_embeddings",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim",
})
# fmt: on
"""Settings that the layers state already, in one form for all ages of configs."""

# fmt: off
_WITHOUT_EFFECT = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "vocab_size", "auto_map",
    "use_cache", "cache_implementation", "return_dict", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "is_decoder", "is_encoder_decoder", "name_or_path", "pretraining_tp",
    "initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout",
    "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "output_router_logits",
    "output_attentions", "output_hidden_states", "quantization_config", "tie_word_embeddings",
    "gradient_checkpointing", "num_nextn_predict_layers", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id", "boi_token_index",
    "eoi_token_index", "image_token_index", "mm_tokens_per_image",
})
# fmt: on
"""Settings that change no number of the forward pass, or that the tensors show (vocab_size,
tie_word_embeddings)."""


def kin(config: Mapping[str, Any], weights: Mapping[str, Weight]) -> bytes:
    """The kin of a model: 32 bytes, equal for the same weights from safetensors, GGUF, or a model in memory.

    `weights` are its parameters and kept buffers by Hugging Face name. Raises UnsupportedModel.
    """
    settings = text_config(config)
    chosen = _language_weights(settings, weights)
    unit_norms = settings["model_type"] in _UNIT_NORMS
    samples = []
    for name in sorted(chosen):
        # GGUF stores the effective factor 1 + weight, which keeps less of a small weight: so the factor is
        # compared.
        shift = 1.0 if unit_norms and name.endswith("norm.weight") else 0.0
        samples.append((name, chosen[name].shape, _as_bfloat16(_sampled(chosen[name]) + shift)))
    return digest("retain/kin", canonical_config(config), samples)


def kin_of_files(path: Path) -> bytes:
    """The kin of the model in a directory or a GGUF file. Reads headers and samples only."""
    model = open_model(path)
    return kin(model.config, model.weights)


def variant(weights: bytes, dtype: str, engine: str, numeric: str = "float") -> bytes:
    """The variant: `weights` is the digest of all weights, `dtype` that of the KV, `engine` the engine
    family."""
    if dtype not in DTYPES:
        raise UnsupportedModel(f"KV of dtype {dtype!r} cannot be kept; known are {', '.join(DTYPES)}")
    if numeric not in NUMERIC_CLASSES:
        raise ValueError(f"a numeric class is one of {', '.join(NUMERIC_CLASSES)}, got {numeric!r}")
    return digest("retain/variant", weights, dtype, engine, numeric)


def canonical_config(config: Mapping[str, Any]) -> Field:
    """The settings that change the numbers, in one form whatever file and release they come from.

    The geometry comes from `layers_of`. Of the rest, settings without effect and unset ones are left out;
    every other setting counts, also one that Retain has never heard of.
    """
    settings = text_config(config)
    family = str(settings["model_type"])
    kept: dict[str, Field] = {}
    for name, value in settings.items():
        if name in _GEOMETRY or name in _WITHOUT_EFFECT or name.startswith("_") or not value:
            continue
        kept[_SYNONYMS.get(name, name)] = _setting(value)
    if settings.get("hidden_activation"):
        kept["hidden_act"] = _setting(settings["hidden_activation"])
    layers = tuple((count, _layer(layer)) for count, layer in runs(layers_of(config, latent=True)))
    return (_TWINS.get(family, family), tuple(sorted(kept.items())), layers)


def canonical_name(name: str) -> str | None:
    """A weight's name in a plain language model; None for a part of another model (vision) or a derived
    table."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    name = name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")
    expert = re.fullmatch(r"(.*\.experts\.\d+)\.(w[123])\.weight", name)
    if expert:
        name = f"{expert[1]}.{_MIXTRAL[expert[2]]}.weight"
    if not name.startswith(("model.", "lm_head.")) or name.endswith("rotary_emb.inv_freq"):
        return None
    return name


def _language_weights(settings: Mapping[str, Any], weights: Mapping[str, Weight]) -> dict[str, Weight]:
    nested = any("language_model." in name for name in weights)
    count = int(settings["num_hidden_layers"])
    chosen = {}
    for name, weight in weights.items():
        if nested and "language_model." not in name and not name.startswith("lm_head."):
            continue
        canonical = canonical_name(name)
        layer = re.match(r"model\.layers\.(\d+)\.", canonical or "")
        if canonical is None or (layer and int(layer[1]) >= count):
            continue
        chosen.update(_experts(canonical, weight))
    if settings.get("tie_word_embeddings"):
        chosen.pop("lm_head.weight", None)
    if not any(name.startswith("model.layers.") for name in chosen):
        raise UnsupportedModel(
            f"the weights of this {settings['model_type']} model are not named model.layers.N...: "
            "their kin cannot be told"
        )
    return chosen


@dataclass(frozen=True)
class _Part:
    """Some rows of a weight as a matrix of their own."""

    whole: Weight
    start: int
    shape: tuple[int, ...]

    def sample(self, rows: Indices, columns: Indices) -> Values:
        return self.whole.sample(rows + self.start, columns)


def _experts(name: str, weight: Weight) -> dict[str, Weight]:
    """The experts of a layer apart, as files hold them: transformers fuses them on loading."""
    fused = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
    if not fused or len(weight.shape) != 3:
        return {name: weight}
    count, rows, columns = weight.shape
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    height = rows // len(parts)
    return {
        f"{fused[1]}.{expert}.{part}.weight": _Part(weight, expert * rows + index * height, (height, columns))
        for expert in range(count)
        for index, part in enumerate(parts)
    }


def _sampled(weight: Weight) -> Values:
    rows, columns = sample_positions(weight.shape)
    return weight.sample(rows, columns)


def sample_positions(shape: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Which values of a tensor are sampled: rows evenly spread, and columns spread so that no stride hides a
    change."""
    columns = shape[-1] if shape else 1
    rows = int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1
    if rows == 0 or columns == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.arange(SAMPLES, dtype=np.int64)
    return (2 * order + 1) * rows // (2 * SAMPLES), (order * _SPREAD % 2**32) * columns >> 32


def _as_bfloat16(values: Values) -> bytes:
    """Rounded to the nearest bfloat16, ties to even; every NaN alike."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype("<u2").tobytes()


def _layer(layer: LayerSpec) -> Field:
    rope = layer.rope
    turned: Field = None
    if rope is not None:
        rules = tuple((name, _setting(value)) for name, value in rope.parameters)
        turned = (_setting(rope.theta), rope.rotary_dim, rope.scaling, rules)
    return (layer.kind, layer.heads, layer.k_dim, layer.v_dim, layer.window, turned)


def _setting(value: Any) -> Field:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(number(value))
    if isinstance(value, (list, tuple)):
        return tuple(_setting(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _setting(item)) for key, item in value.items() if item))
    raise UnsupportedModel(
        f"the config holds a {type(value).__name__}, {value!r}, which is not a value of JSON"
    )
