"""Tiny random models of every family whose layers Retain reads: small enough to build and run in a test."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import transformers

hf: Any = transformers
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 16
_LLAMA3: Any = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
_LLAMA31: Any = {**_LLAMA3, "original_max_position_embeddings": 8192}
_LONGROPE: Any = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 2.5, 3.0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
_YARN: Any = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

CONFIGS: MappingProxyType[str, Callable[[], Any]] = MappingProxyType(
    {
        "llama-gqa": lambda: hf.LlamaConfig(**_SIZES),
        "llama-mqa": lambda: hf.LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}),
        "llama-head-80": lambda: hf.LlamaConfig(**_SIZES, head_dim=80),
        "llama-one-layer": lambda: hf.LlamaConfig(**{**_SIZES, "num_hidden_layers": 1}),
        "llama-tied": lambda: hf.LlamaConfig(**_SIZES, tie_word_embeddings=True),
        "llama-linear": lambda: hf.LlamaConfig(
            **_SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        ),
        "llama-dynamic": lambda: hf.LlamaConfig(
            **_SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
        "llama-llama3": lambda: hf.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
        "llama-31": lambda: hf.LlamaConfig(**_SIZES, rope_parameters=_LLAMA31),
        "llama-yarn": lambda: hf.LlamaConfig(**_SIZES, rope_parameters=_YARN),
        "mistral": lambda: hf.MistralConfig(**_SIZES, sliding_window=WINDOW),
        "mistral-full": lambda: hf.MistralConfig(**_SIZES, sliding_window=None),
        "qwen2": lambda: hf.Qwen2Config(**_SIZES),
        "qwen2-sliding": lambda: hf.Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        "qwen3": lambda: hf.Qwen3Config(**_SIZES, head_dim=32),
        "gemma": lambda: hf.GemmaConfig(**_SIZES, head_dim=16),
        "gemma2": lambda: hf.Gemma2Config(
            **_SIZES, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
        ),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **{**_SIZES, "num_hidden_layers": 7}, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
        ),
        "phi3": lambda: hf.Phi3Config(
            **_SIZES,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        "phi3-longrope": lambda: hf.Phi3Config(
            **_SIZES, rope_parameters=_LONGROPE, original_max_position_embeddings=64
        ),
        "smollm3": lambda: hf.SmolLM3Config(**{**_SIZES, "num_hidden_layers": 4}),
        "mixtral": lambda: hf.MixtralConfig(**_SIZES, num_local_experts=4),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(
            **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "glm": lambda: hf.GlmConfig(**_SIZES, head_dim=16),
        "cohere": lambda: hf.CohereConfig(**_SIZES),
        "cohere2": lambda: hf.Cohere2Config(**{**_SIZES, "num_hidden_layers": 4}, sliding_window=WINDOW),
        "gpt-oss": lambda: hf.GptOssConfig(**_SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=4),
        "deepseek-v2": lambda: hf.DeepseekV2Config(
            **{**_SIZES, **_DEEPSEEK, "n_group": None, "topk_group": None}
        ),
        "deepseek-v3": lambda: hf.DeepseekV3Config(**{**_SIZES, **_DEEPSEEK}),
    }
)


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of a family, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model: Any = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                # Norms and biases begin as ones and zeros, which would hide an offset or a swapped row.
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "embed" in key:
                    parameter.mul_(4.0)
    model.eval()
    return model
