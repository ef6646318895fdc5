"""Tiny random models of the shapes that attention comes in: seconds where a real model takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 300

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # Wide enough that the likeliest token is likeliest by far: texts are compared.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return _made(LlamaForCausalLM, LlamaConfig(**{**_SMALL, **changes}), seed, dtype)


def gemma3(**changes: Any) -> Any:
    settings = {
        **_SMALL,
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        **changes,
    }
    return _made(Gemma3ForCausalLM, Gemma3TextConfig(**settings), 0, torch.float32)


def mistral() -> Any:
    return _made(MistralForCausalLM, MistralConfig(**{**_SMALL, "sliding_window": 300}), 0, torch.float32)


def phi3() -> Any:
    return _made(Phi3ForCausalLM, Phi3Config(**{**_SMALL, "partial_rotary_factor": 0.5}), 0, torch.float32)


def qwen2() -> Any:
    settings = {name: value for name, value in _SMALL.items() if name != "head_dim"}
    model = _made(Qwen2ForCausalLM, Qwen2Config(**settings), 0, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros would hide a wrong order
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def qwen3() -> Any:
    return _made(Qwen3ForCausalLM, Qwen3Config(**_SMALL), 0, torch.float32)


MODELS: dict[str, Callable[[], Any]] = {
    "llama-gqa": llama,
    "llama-mqa": lambda: llama(num_key_value_heads=1),
    "llama-head-80": lambda: llama(head_dim=80),
    "llama-1-layer": lambda: llama(num_hidden_layers=1),
    "llama-bfloat16": lambda: llama(dtype=torch.bfloat16),
    "qwen3": qwen3,
    "gemma3-window-32": gemma3,
    "mistral-window-300": mistral,
    "phi3-partial-rotary": phi3,
}


def _made(kind: Any, config: Any, seed: int, dtype: torch.dtype) -> Any:
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    return kind(config).to(dtype).eval()


def prompt(count: int, seed: int = 7) -> list[int]:
    """Random tokens; a longer prompt of the same seed goes on from a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (4096,), generator=generator).tolist()[:count]


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """The plain model's logits behind the last token."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
    return found


def text_of(model: Any, tokens: list[int], count: int) -> list[int]:
    """The plain model's greedy answer."""
    ids = torch.tensor([tokens])
    answer: list[int] = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )[0, ids.shape[1] :].tolist()
    return answer
