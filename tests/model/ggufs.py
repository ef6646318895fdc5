"""Writes the GGUF file of a tiny model as llama.cpp's converter would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "qwen2": {"post_attention_layernorm": "ffn_norm"},
    "qwen3": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def write_gguf(
    model: Any, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> None:
    """Write `model` (llama, qwen2, qwen3 or gemma3) to `path`, its matrices quantised as `kind`."""
    config = model.config
    family = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if family == "llama":
        writer.add_rope_dimension_count(size)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, size))
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            values = _interleaved(values, heads[part])
        target = _gguf_name(name, family)
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, np.ascontiguousarray(values))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: Any, heads: int) -> Any:
    # LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _llama3_factors(rope: Any, size: int) -> Any:
    # LlamaModel.generate_extra_tensors in llama.cpp's convert_hf_to_gguf.py
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    found = []
    for index in range(0, size, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / size)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def _gguf_name(name: str, family: str) -> str:
    names = {**_NAMES, **_NORMS[family]}
    stem, _, leaf = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{leaf}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{leaf}"
