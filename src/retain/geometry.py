"""Geometry: what each layer's KV looks like, read from a transformers config.

The same model gives the same layers from a `config.json`, from the config object of a loaded model, and from
a config rebuilt from a GGUF file: defaults that a file leaves out are filled in, settings of older files are
read where newer ones are absent, and numbers are rounded to float32, the precision that a GGUF file keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from retain.errors import UnsupportedModel
from retain.model import LayerSpec, RopeSpec

Config = Mapping[str, Any]

_GEMMA: Config = {"head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_FAMILIES: Mapping[str, Config] = MappingProxyType(
    {
        "llama": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
        "mistral": {
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        },
        "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
        "qwen2": {
            "sliding_window": 4096,
            "max_window_layers": 28,
            "use_sliding_window": False,
            "hidden_act": "silu",
        },
        "qwen2_moe": {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False},
        "qwen3": {
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        },
        "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False},
        "gemma": {**_GEMMA, "num_attention_heads": 16, "num_key_value_heads": 16},
        "gemma2": {
            **_GEMMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        "gemma3_text": {
            **_GEMMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        "phi3": {"rms_norm_eps": 1e-5, "hidden_act": "silu", "original_max_position_embeddings": 4096},
        "smollm3": {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "rms_norm_eps": 1e-6,
        },
        "gpt_oss": {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "deepseek_v2": {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        "deepseek_v3": {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    }
)
"""What transformers 5.24 takes for settings that a config of the family leaves out."""

_INTERLEAVED = frozenset(
    {
        "cohere",
        "cohere2",
        "deepseek_v2",
        "cohere2_moe",
        "glm",
        "glm4",
        "helium",
        "ernie4_5",
        "ernie4_5_moe",
        "llama4_text",
    }
)
"""Families whose keys transformers rotates in neighbouring pairs (0, 1), (2, 3) instead of half-split
ones."""

_FULL_BELOW = frozenset({"qwen2", "qwen2_moe", "qwen3"})
"""Families in which the layers below `max_window_layers` are full; others state the number and ignore it."""

_PLAIN_WHEN_FULL = frozenset({"cohere2", "exaone4"})
"""Families that rotate the keys of their sliding layers alone, where they have any."""

_RULES = frozenset({"none", "linear", "dynamic", "yarn", "llama3", "longrope"})
_RULE_NAMES = MappingProxyType({"default": "none", "su": "longrope"})
_KINDS = MappingProxyType({"full_attention": "full", "sliding_attention": "sliding"})
_NOT_PARAMETERS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def layers_of(config: Config, *, latent: bool = False) -> tuple[LayerSpec, ...]:
    """The layers of the model with this config: `config.json` as read, or a config object's `to_dict()`.

    A layer with multi-head latent attention (DeepSeek) has one head: the latent of `kv_lora_rank` numbers
    and, behind it, `qk_rope_head_dim` rotated ones. By default the spec is what transformers' DynamicCache
    holds, the latent as K and the rotated part as V; with `latent=True` it is what other engines hold, both
    in K and no V. The RoPE's parameter `kv_lora_rank` says how many numbers come before the rotated ones.

    Raises UnsupportedModel naming the layer or the setting.
    """
    settings = text_config(config)
    kinds = layer_kinds(settings)
    return tuple(_layer(settings, index, kind, latent) for index, kind in enumerate(kinds))


def text_config(config: Config) -> dict[str, Any]:
    """The settings of the language model in a config, with what its family takes for settings that are left
    out."""
    settings = dict(config)
    while isinstance(settings.get("text_config"), Mapping):
        outer, settings = settings, dict(settings["text_config"])
        settings.setdefault("model_type", outer.get("model_type"))
    family = str(settings.get("model_type") or "")
    family = "gemma3_text" if family == "gemma3" else family
    settings["model_type"] = family
    if settings.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"{family} is an encoder-decoder model (is_encoder_decoder); only decoders have a KV prefix"
        )
    return {**_FAMILIES.get(family, {}), **settings}


def layer_kinds(settings: Config) -> tuple[str, ...]:
    """The kind of every layer, from `layer_types` or from the settings that older configs use instead of
    it."""
    count = _integer(settings, "num_hidden_layers")
    named = settings.get("layer_types")
    if named is None:
        return tuple(_kind_by_window(settings, index) for index in range(count))
    if len(named) != count:
        raise UnsupportedModel(f"layer_types names {len(named)} layers, but num_hidden_layers is {count}")
    for index, name in enumerate(named):
        if name not in _KINDS:
            raise UnsupportedModel(f"layer {index} is of the type {name!r}; known are {', '.join(_KINDS)}")
    return tuple(_KINDS[name] for name in named)


def number(value: float) -> float:
    """A number as the shortest decimal of its float32: equal for a config file and for the float32 of a GGUF
    file."""
    return float(str(np.float32(value)))


def _kind_by_window(settings: Config, index: int) -> str:
    if settings.get("sliding_window") is None or settings.get("use_sliding_window") is False:
        return "full"
    pattern = settings.get("_sliding_window_pattern", settings.get("sliding_window_pattern"))
    if pattern:
        return "sliding" if (index + 1) % int(pattern) else "full"
    first = int(settings.get("max_window_layers") or 0) if settings["model_type"] in _FULL_BELOW else 0
    return "sliding" if index >= first else "full"


def _layer(settings: Config, index: int, kind: str, latent: bool) -> LayerSpec:
    for setting in ("num_kv_shared_layers", "kv_sharing_modes", "alibi"):
        if settings.get(setting):
            raise UnsupportedModel(
                f"{setting} = {settings[setting]!r} is not supported: layers would share or lack their KV"
            )
    window = _integer(settings, "sliding_window") if kind == "sliding" else None
    if settings.get("kv_lora_rank") is not None:
        if kind == "sliding":
            raise UnsupportedModel(f"layer {index} is both latent and sliding, which is not supported")
        rank, turned = _integer(settings, "kv_lora_rank"), _integer(settings, "qk_rope_head_dim")
        rope = _rope(settings, index, kind, turned, before="kv_lora_rank")
        return LayerSpec("latent", 1, *((rank + turned, 0) if latent else (rank, turned)), rope=rope)
    heads = _integer(settings, "num_attention_heads")
    size = head_dim(settings)
    kv_heads = (
        heads if settings.get("num_key_value_heads") is None else _integer(settings, "num_key_value_heads")
    )
    return LayerSpec(kind, kv_heads, size, size, window, _rope(settings, index, kind, size))


def head_dim(settings: Config) -> int:
    """The size of an attention head."""
    if settings.get("head_dim") is not None:
        return _integer(settings, "head_dim")
    return _integer(settings, "hidden_size") // _integer(settings, "num_attention_heads")


def _rope(settings: Config, index: int, kind: str, size: int, before: str | None = None) -> RopeSpec | None:
    if not _rotated(settings, index, kind):
        return None
    given = _rope_settings(settings, kind)
    if given.get("mrope_section") or given.get("type") == "mrope":
        raise UnsupportedModel(
            "RoPE with mrope_section turns by several positions at once, which is not supported"
        )
    name = str(given.get("rope_type") or given.get("type") or "default")
    rule = _RULE_NAMES.get(name, name)
    if rule not in _RULES:
        raise UnsupportedModel(
            f"the RoPE rule {name!r} (rope_type) of layer {index} is not known; known are {_known()}"
        )
    share = given.get(
        "partial_rotary_factor", settings.get("partial_rotary_factor", settings.get("rotary_pct"))
    )
    if before is not None or share is None:
        share = 1.0
    theta = number(_theta(settings, given))
    parameters = _parameters(settings, given, rule)
    if settings["model_type"] in _INTERLEAVED:
        parameters["pairs"] = "interleaved"
    if before is not None:
        parameters[before] = float(_integer(settings, before))
    return RopeSpec(theta, int(size * float(share)), rule, tuple(sorted(parameters.items())))


def _rotated(settings: Config, index: int, kind: str) -> bool:
    mixed = settings.get("sliding_window") is not None
    if kind == "full" and mixed and settings["model_type"] in _PLAIN_WHEN_FULL:
        return False
    flags = settings.get("no_rope_layers")
    if flags:
        return bool(flags[index])
    interval = settings.get("no_rope_layer_interval")
    return not interval or (index + 1) % int(interval) != 0


def _rope_settings(settings: Config, kind: str) -> Config:
    """The RoPE settings of layers of one kind: transformers 5's `rope_parameters`, or those of older
    configs."""
    given = settings.get("rope_parameters")
    if not given:
        given = settings.get("rope_scaling") or {}
        if kind == "sliding" and settings.get("rope_local_base_freq") is not None:
            # Gemma 3 before transformers 5: sliding layers have a base of their own, and no scaling.
            return {"rope_type": "default", "rope_theta": settings["rope_local_base_freq"]}
    for name, known in _KINDS.items():
        if known == kind and isinstance(given.get(name), Mapping):
            return dict(given[name])
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel(
            f"rope_parameters has entries for {', '.join(given)}, but none for {kind} layers"
        )
    return dict(given)


def _theta(settings: Config, given: Config) -> float:
    for value in (given.get("rope_theta"), settings.get("rope_theta"), settings.get("rotary_emb_base")):
        if value is not None:
            return float(value)
    if settings["model_type"] in _FAMILIES or given:
        return 1e4
    raise UnsupportedModel(
        f"the config of this {settings['model_type'] or 'unnamed'} model has no rope_theta: "
        "how its keys hold positions is unknown"
    )


def _parameters(settings: Config, given: Config, rule: str) -> dict[str, float | str | tuple[float, ...]]:
    if rule == "none":
        return {}
    values = {key: value for key, value in given.items() if key not in _NOT_PARAMETERS and value is not None}
    longest = settings.get("max_position_embeddings")
    if rule in ("yarn", "llama3", "longrope"):
        original = settings.get("original_max_position_embeddings")
        if original is not None:
            values["original_max_position_embeddings"] = original
        elif longest is not None:
            values.setdefault("original_max_position_embeddings", longest)
        if (
            rule != "llama3"
            and "factor" not in values
            and longest
            and values.get("original_max_position_embeddings")
        ):
            values["factor"] = longest / values["original_max_position_embeddings"]
    if rule == "dynamic" and longest is not None:
        values.setdefault("max_position_embeddings", longest)
    if rule == "yarn":
        values.setdefault("beta_fast", 32)
        values.setdefault("beta_slow", 1)
        values.setdefault("truncate", True)
    return {key: _parameter(key, value) for key, value in values.items()}


def _parameter(key: str, value: Any) -> float | str | tuple[float, ...]:
    if isinstance(value, (bool, int, float)):
        return number(value)
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value):
        return tuple(number(item) for item in value)
    raise UnsupportedModel(
        f"the RoPE setting {key} = {value!r} is neither a number, nor a word, nor a list of numbers"
    )


def _integer(settings: Config, name: str) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{name} must be a number above zero in the model's config, got {value!r}")
    return value


def _known() -> str:
    return ", ".join(sorted(_RULES))
