"""Layers read from configs: what the live cache holds, whatever form the config comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retain.errors import UnsupportedModel
from retain.geometry import layers_of
from retain.model import LayerSpec, RopeSpec

LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI3_MINI_128K = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
}
PHI4_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
}
MISTRAL_01 = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
MISTRAL_03 = {**MISTRAL_01, "sliding_window": None, "rope_theta": 1000000.0}
QWEN25 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
QWEN2_SLIDING = {**QWEN25, "use_sliding_window": True}
QWEN25_YARN = {
    **QWEN25,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}
GEMMA2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
SMOLLM3_3B = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "rope_theta": 5000000.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA31,
    "gemma-3-4b": GEMMA3_4B,
    "phi-3-mini-128k": PHI3_MINI_128K,
    "phi-4-mini": PHI4_MINI,
    "mistral-0.1": MISTRAL_01,
    "mistral-0.3": MISTRAL_03,
    "qwen2.5-0.5b": QWEN25,
    "qwen2-sliding": QWEN2_SLIDING,
    "qwen2.5-yarn": QWEN25_YARN,
    "gemma-2-2b": GEMMA2_2B,
    "deepseek-v3": DEEPSEEK_V3,
    "smollm3-3b": SMOLLM3_3B,
}
"""The settings of published models that decide their KV, as their config.json writes them."""


def test_llama_has_grouped_full_layers_with_its_rope_scaling() -> None:
    rule = (
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 8192.0),
    )
    layer = LayerSpec("full", 8, 128, 128, None, RopeSpec(500000.0, 128, "llama3", rule))
    assert layers_of(LLAMA31) == (layer,) * 32


def test_gemma3_has_five_sliding_layers_for_each_full_one_with_bases_of_their_own() -> None:
    layers = layers_of(GEMMA3_4B)
    local = LayerSpec("sliding", 4, 256, 256, 1024, RopeSpec(1e4, 256))
    whole = LayerSpec("full", 4, 256, 256, None, RopeSpec(1e6, 256, "linear", (("factor", 8.0),)))
    assert layers == (*((local,) * 5 + (whole,)) * 5, *(local,) * 4)


def test_qwen2_slides_only_when_told_to_and_only_from_the_layer_it_names() -> None:
    assert {layer.kind for layer in layers_of(QWEN25)} == {"full"}
    assert [layer.kind for layer in layers_of(QWEN2_SLIDING)] == ["full"] * 21 + ["sliding"] * 3


def test_phi_turns_only_a_part_of_each_head() -> None:
    rope = layers_of(PHI4_MINI)[0].rope
    assert rope is not None
    assert (layers_of(PHI4_MINI)[0].k_dim, rope.rotary_dim) == (128, 96)


def test_smollm3_leaves_every_fourth_layer_without_positions() -> None:
    assert [layer.rope is None for layer in layers_of(SMOLLM3_3B)] == [False, False, False, True] * 9


def test_cohere2_leaves_its_full_layers_without_positions() -> None:
    cohere2 = {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 50000,
        "sliding_window": 4096,
    }
    layers = layers_of(cohere2)
    assert [layer.kind for layer in layers] == ["sliding", "sliding", "sliding", "full"] * 8
    assert all((layer.rope is None) == (layer.kind == "full") for layer in layers)


def test_deepseek_is_offered_as_the_cache_holds_it_and_as_latent() -> None:
    held, latent = layers_of(DEEPSEEK_V3)[0], layers_of(DEEPSEEK_V3, latent=True)[0]
    assert (held.kind, held.heads, held.k_dim, held.v_dim) == ("latent", 1, 512, 64)
    assert (latent.kind, latent.heads, latent.k_dim, latent.v_dim) == ("latent", 1, 576, 0)
    assert held.rope == latent.rope
    assert latent.rope is not None
    assert latent.rope.rotary_dim == 64
    assert dict(latent.rope.parameters)["kv_lora_rank"] == 512.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer 1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "linear", "factor": {"a": 1}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear", "factor": [None]}}, "factor"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"num_attention_heads": [4, 4, 8]}, "num_attention_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"alibi": True}, "alibi"),
        ({"model_type": "never-heard-of"}, "rope_theta"),
    ],
)
def test_a_layer_or_setting_that_is_not_known_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        **change,
    }
    with pytest.raises(UnsupportedModel, match=named):
        layers_of(config)


def test_numbers_that_passed_through_a_gguf_file_give_the_same_layers() -> None:
    import numpy as np

    through = float(np.float32(0.1))
    plain = {**LLAMA31, "rope_theta": 12345.678, "rope_scaling": {"rope_type": "linear", "factor": 0.1}}
    rounded = {
        **plain,
        "rope_theta": float(np.float32(12345.678)),
        "rope_scaling": {"rope_type": "linear", "factor": through},
    }
    assert layers_of(plain) == layers_of(rounded)


@pytest.mark.engine
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_and_the_live_object_made_of_it_give_the_same_layers(name: str) -> None:
    import transformers

    from retain.fingerprint import canonical_config

    published = PUBLISHED[name]
    settings = json.loads(json.dumps(published))
    live = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    assert layers_of(live.to_dict()) == layers_of(published)
    again = json.loads(live.to_json_string())
    assert layers_of(again) == layers_of(published)
    assert canonical_config(again) == canonical_config(live.to_dict())


def _tiny_names() -> list[str]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.model.tiny import CONFIGS

    return list(CONFIGS)


@pytest.fixture(scope="module", params=_tiny_names())
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """The name and the model of each tiny family."""
    from tests.model.tiny import tiny_model

    return request.param, tiny_model(request.param)


@pytest.mark.engine
def test_a33_layers_equal_what_the_live_cache_holds_after_a_forward(family: tuple[str, Any]) -> None:
    import torch

    _, model = family
    layers = layers_of(model.config.to_dict())
    tokens = torch.arange(40)[None]
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    assert len(cache.layers) == len(layers)
    for held, layer in zip(cache.layers, layers, strict=True):
        length = 40 if layer.window is None else layer.window - 1
        assert tuple(held.keys.shape) == (1, layer.heads, length, layer.k_dim)
        assert tuple(held.values.shape) == (1, layer.heads, length, layer.v_dim)
        assert ("Sliding" in type(held).__name__) == (layer.kind == "sliding")


@pytest.mark.engine
def test_a33_rope_of_the_first_layer_turns_live_keys_from_one_position_to_another(
    family: tuple[str, Any],
) -> None:
    import torch

    _, model = family
    layer = layers_of(model.config.to_dict())[0]
    rope = layer.rope
    assert rope is not None
    # The first layer sees one and the same input at every position, so its keys differ by their rotation
    # alone.
    cache = model(input_ids=torch.full((1, 12), 5), use_cache=True).past_key_values
    held = cache.layers[0]
    keys = (held.values if layer.kind == "latent" else held.keys)[0].double()
    half = rope.rotary_dim // 2
    parameters = dict(rope.parameters)
    if rope.scaling in ("none", "linear"):
        stretch = parameters.get("factor", 1.0)
        assert isinstance(stretch, float)
        frequency = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half) / stretch
    else:
        frequency = model.model.rotary_emb.inv_freq.double()
    expected = keys[:, :1].repeat(1, 12, 1)
    angle = torch.arange(12, dtype=torch.float64)[:, None] * frequency
    pairs = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if "pairs" in parameters
        else (slice(half), slice(half, 2 * half))
    )
    low, high = (expected[:, :, at].clone() for at in pairs)
    expected[:, :, pairs[0]] = low * angle.cos() - high * angle.sin()
    expected[:, :, pairs[1]] = high * angle.cos() + low * angle.sin()
    assert torch.allclose(keys, expected, atol=1e-4)
    assert not torch.allclose(keys, keys[:, :1].expand_as(keys), atol=1e-2)


@pytest.mark.engine
def test_a_config_on_disk_gives_the_layers_of_the_live_one(family: tuple[str, Any], tmp_path: Any) -> None:
    from retain.fingerprint import canonical_config

    _, model = family
    model.config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert layers_of(written) == layers_of(model.config.to_dict())
    assert canonical_config(written) == canonical_config(model.config.to_dict())
    shortened = {**model.config.to_diff_dict(), "model_type": model.config.model_type}
    assert layers_of(json.loads(json.dumps(shortened))) == layers_of(written)
