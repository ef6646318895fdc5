"""Inputs: which calls can be served with kept KV. Everything else is refused with a sentence, never answered
wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from retain.errors import UnsupportedInput
from retain.identity import Tokens, as_tokens

_OWN_CACHE = ("cache", "past_key_values", "cache_params", "inputs_embeds", "encoder_outputs")
_PASSED_ON = {
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
    "attention_mask",
    "position_ids",
}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "token_healing": (None, False),
}


def prompt_tokens(input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Tokens:
    """The token ids of a batch of one without padding. Raises UnsupportedInput for anything else."""
    ids = torch.as_tensor(input_ids)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UnsupportedInput(
            f"input_ids must be whole numbers of shape [1, tokens], got {ids.dtype} {list(ids.shape)}"
        )
    if ids.shape[0] != 1:
        raise UnsupportedInput(
            f"a batch of {ids.shape[0]} prompts cannot be served from kept KV; call once for each prompt, "
            "or call the model itself"
        )
    count = ids.shape[1]
    if count == 0:
        raise UnsupportedInput("the prompt has no tokens; give at least one")
    if attention_mask is not None:
        _check_mask(torch.as_tensor(attention_mask), count)
    if position_ids is not None:
        positions = torch.as_tensor(position_ids).reshape(-1).cpu()
        if not torch.equal(positions, torch.arange(count, dtype=positions.dtype)):
            raise UnsupportedInput(
                f"position_ids must count from 0 to {count - 1}, for kept KV is tied to its positions; "
                "leave them out"
            )
    try:
        return as_tokens(ids[0].cpu().numpy())
    except ValueError as error:
        raise UnsupportedInput(f"input_ids are not token ids: {error}") from error


def _check_mask(mask: Tensor, count: int) -> None:
    if list(mask.shape) not in ([1, count], [count]):
        raise UnsupportedInput(
            f"the attention mask has shape {list(mask.shape)} for {count} tokens; give input_ids and mask of "
            "the whole prompt, also of the part that is kept"
        )
    if not bool((mask == 1).all()):
        raise UnsupportedInput(
            "a padded or masked prompt cannot be served from kept KV; remove the padding and the mask's zeros"
        )


def check_generate(kwargs: Mapping[str, Any], defaults: GenerationConfig) -> None:
    """Raise UnsupportedInput for an argument of `generate` that kept KV cannot serve."""
    for name in _OWN_CACHE:
        if kwargs.get(name) is not None:
            raise UnsupportedInput(
                f"{name} cannot be combined with kept KV; call model.generate itself to use your own"
            )
    known = _PASSED_ON | set(vars(defaults)) | set(_REFUSED)
    for name, value in kwargs.items():
        if name not in known and value is not None:
            raise UnsupportedInput(
                f"{name} is not known to leave the KV of the prompt's tokens as it is; call "
                "model.generate itself with it"
            )
    config = kwargs.get("generation_config") or defaults
    for name, allowed in _REFUSED.items():
        value = kwargs.get(name)
        value = getattr(config, name, None) if value is None else value
        if not any(value is each or value == each for each in allowed):
            raise UnsupportedInput(
                f"{name}={value!r} cannot be served from kept KV; call model.generate itself with it"
            )
