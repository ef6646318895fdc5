"""Rotary positions are taken out of keys as transformers puts them in, for every rule."""

from __future__ import annotations

import numpy as np
import pytest

from retain.codecs.ladder.rope import Rotation
from retain.errors import UnsupportedInput, UnsupportedModel
from retain.geometry import layers_of
from retain.model import LayerSpec, RopeSpec

BASE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
RULES = {
    "plain": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, a factor of its own": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "attention_factor": 0.7,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


@pytest.mark.engine
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", [0, 7, 200])
def test_keys_are_freed_as_transformers_turned_them(rule: str, first: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(**BASE, rope_parameters=RULES[rule])
    check(torch, config, LlamaRotaryEmbedding(config), apply_rotary_pos_emb, first)


@pytest.mark.engine
@pytest.mark.parametrize("family", ["cohere", "glm", "stablelm"])
def test_neighbouring_pairs_and_partial_rotation_are_those_of_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    title = {"cohere": "Cohere", "glm": "Glm", "stablelm": "StableLm"}[family]
    kind = getattr(importlib.import_module(f"transformers.models.{family}"), f"{title}Config")
    share = {"cohere": {}, "glm": {"partial_rotary_factor": 0.5}, "stablelm": {"partial_rotary_factor": 0.25}}
    theta = {"rope_type": "default", "rope_theta": 1e4, **share[family]}
    config = kind(**BASE, rope_parameters=theta, pad_token_id=0)
    rotary = getattr(module, f"{title}RotaryEmbedding")(config)
    size = int(16 * share[family].get("partial_rotary_factor", 1))

    def turned(q, k, cos, sin):
        if family != "stablelm":
            return module.apply_rotary_pos_emb(q, k, cos, sin)
        _, part = module.apply_rotary_pos_emb(q[..., :size], k[..., :size], cos, sin)
        return q, torch.cat([part, k[..., size:]], dim=-1)

    check(torch, config, rotary, turned, 5)


def check(torch, config, rotary, turned, first: int) -> None:
    layers = layers_of(config.to_dict())
    free = torch.randn(1, 2, 48, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(first, first + 48)[None]
    cos, sin = rotary(free, positions)
    _, keys = turned(free, free, cos, sin)
    rotation = Rotation(layers)
    found = rotation.remove(keys.numpy(), first)
    assert np.abs(found - free.numpy()).max() < 5e-5
    assert np.abs(rotation.apply(found, first) - keys.numpy()).max() < 5e-5


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_a_move_to_where_frequencies_are_others_is_refused(scaling: str) -> None:
    factors = tuple(float(i) for i in range(1, 9))
    rope = RopeSpec(
        1e4,
        16,
        scaling,
        (
            ("factor", 2.0),
            ("long_factor", factors),
            ("max_position_embeddings", 64.0),
            ("original_max_position_embeddings", 64.0),
            ("short_factor", factors),
        ),
    )
    rotation = Rotation((LayerSpec("full", 1, 16, 16, None, rope),))
    rotation.check_move(0, 16, 48)
    rotation.check_move(100, 16, 100)
    for first, position in ((0, 49), (60, 0), (100, 200)):
        with pytest.raises(UnsupportedInput, match="64"):
            rotation.check_move(first, 16, position)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(1e4, 3),
        RopeSpec(1e4, 32),
        RopeSpec(1e4, 0),
        RopeSpec(-1.0, 16),
        RopeSpec(1e4, 16, "linear"),
        RopeSpec(1e4, 16, "linear", (("factor", 0.0),)),
        RopeSpec(1e4, 16, "yarn", (("factor", 2.0),)),
        RopeSpec(1e4, 16, "longrope", (("original_max_position_embeddings", 64.0), ("short_factor", (1.0,)))),
        RopeSpec(1e4, 16, "none", (("pairs", "crossed"),)),
        RopeSpec(1e4, 16, "none", (("kv_lora_rank", 8.0),)),
    ],
    ids=str,
)
def test_a_rotation_that_cannot_be_undone_is_refused(rope: RopeSpec) -> None:
    with pytest.raises(UnsupportedModel):
        Rotation((LayerSpec("full", 1, 16, 16, None, rope),))
