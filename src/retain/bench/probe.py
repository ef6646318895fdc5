"""The probe of a handshake: tokens of a text that says something, longer than a model's windows."""

from __future__ import annotations

from retain.bench.texts import long_prompt
from retain.models import Source


def probe_tokens(model: Source) -> list[int]:
    """The token ids that engines prefill when they try each other's KV. Raises UnsupportedModel."""
    from retain.bench.handshake import PROBE_TOKENS
    from retain.engines.transformers.loading import load_tokenizer
    from retain.geometry import layers_of
    from retain.identity import BLOCK_TOKENS
    from retain.weights import open_model

    tokenizer = load_tokenizer(model)
    windows = [layer.window or 0 for layer in layers_of(open_model(model.path).config)]
    length = max(PROBE_TOKENS, max(windows) + BLOCK_TOKENS)
    return long_prompt(lambda text: tokenizer.encode(text, add_special_tokens=False), length)
