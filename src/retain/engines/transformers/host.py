"""The host: a transformers model as Retain sees it. What it keeps, how it is run, and whether it is still the
same."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from retain.engines.turns import turns_of
from retain.errors import UnsupportedModel
from retain.identity import Tokens
from retain.model import ModelSpec

from .geometry import Geometry, stable_tokens
from .identity import WeightWatch, spec_of
from .layers import BufferPool, Watch, kept_cache, windows_of


class Host:
    """A model that is attached. It is only ever called; nothing of it is changed."""

    def __init__(self, model: Any, spec: ModelSpec | None) -> None:
        """Raises UnsupportedModel, naming what about the model cannot be kept."""
        _check_kind(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.windows = windows_of(self.config)
        self.vocabulary: int | None = getattr(self.config, "vocab_size", None)
        self.stable_tokens = stable_tokens(self.config)
        self.pool = BufferPool()
        self.turns = turns_of(model)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self._lora = [module for module in model.modules() if hasattr(module, "lora_A")]
        self._lock = threading.Lock()
        self._watch = WeightWatch(model)
        self._stamp = self._weights_stamp()
        self.geometry = Geometry(spec or spec_of(model))
        self._probe()

    @property
    def spec(self) -> ModelSpec:
        """The model as it was at the last `refresh`."""
        return self.geometry.spec

    def refresh(self) -> bool:
        """Whether weights or adapters were changed since the last time: that is another model, whose KV is
        kept apart."""
        with self._lock:
            stamp = self._weights_stamp()
            if stamp == self._stamp:
                return False
            self.geometry = Geometry(spec_of(self.model, self.spec.name))
            self._watch = WeightWatch(self.model)
            self._stamp = self._weights_stamp()
            return True

    def empty_cache(self, room: int, watch: Watch | None = None) -> DynamicCache:
        """A cache for the model to fill, with room for so many tokens before it grows."""
        return kept_cache(self.windows, self.pool, room, watch)

    def run(self, tokens: Sequence[int] | Tokens, cache: DynamicCache, keep: int) -> Any:
        """One forward pass behind what the cache holds; the output has the logits of the last `keep` tokens
        at least."""
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None].to(self.model.device)
        more: dict[str, Any] = {self.cache_name: cache}
        if self._keeps_logits:
            more["logits_to_keep"] = keep
        with torch.no_grad():
            return self.model(input_ids=ids, use_cache=True, return_dict=True, **more)

    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer, by the model's generation config."""
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = getattr(self.config, "eos_token_id", None)
        if ends is None:
            return frozenset()
        return frozenset([ends] if isinstance(ends, int) else ends)

    def _weights_stamp(self) -> tuple[Any, ...]:
        """Changes whenever a weight is written or replaced, or an adapter is switched. torch counts most
        writes itself; the watch sees those through `.data`."""
        weights = [
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
            for weight in self.model.parameters()
        ]
        adapters = [
            (
                bool(getattr(module, "merged", False)),
                bool(getattr(module, "disable_adapters", False)),
                str(getattr(module, "active_adapters", "")),
                str(getattr(module, "scaling", "")),
            )
            for module in self._lora
        ]
        return hash(tuple(weights)), self._watch.stamp(), tuple(adapters)

    def _probe(self) -> None:
        """Run one token, to see that the model keeps the KV that its spec describes."""
        cache = self.empty_cache(1)
        self.turns.take(lambda: False)
        try:
            self.run([0], cache, 1)
        finally:
            self.turns.give()
        self.geometry.check(cache)


def _check_kind(model: Any) -> None:
    name = type(model).__name__
    if not hasattr(model, "generate") or not hasattr(model, "generation_config"):
        raise UnsupportedModel(f"a {name} does not generate text; Retain serves causal language models")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"a {name} has an encoder, whose KV Retain does not know to keep")
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise UnsupportedModel(f"a {name} keeps a state of its own instead of a DynamicCache")
    if model.training:
        raise UnsupportedModel(
            "the model is in training mode, where dropout changes its KV; call model.eval() first"
        )
