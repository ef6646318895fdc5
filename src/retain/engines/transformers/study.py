"""Study: a model's KV taken out, put back changed, and what the change does to the tokens that follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from retain.codecs.base import Array
from retain.errors import UnsupportedModel
from retain.identity import Tokens

from .loading import Loaded

Layers = Sequence[tuple[Array, Array]]
"""K and V of every layer, float32 `[heads, tokens, head_dim]`, K with RoPE applied."""


@dataclass(frozen=True)
class Effect:
    """What changed KV does to the tokens after it, each position's next-token distribution beside that on the
    model's own KV.

    `kl` is the divergence in nats at every position; `top1` the share of positions with the same likeliest
    token; `nll` the change of the mean negative log likelihood of the true next tokens, in nats.
    """

    kl: Array
    top1: float
    nll: float

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def p99(self) -> float:
        return float(np.quantile(self.kl, 0.99))


class Reference:
    """The tokens after a context as the model itself sees them: what changed KV is compared with."""

    def __init__(self, study: Study, kv: Layers, after: Tokens) -> None:
        self._study = study
        self._after = after
        self._logits = study.after(kv, after)

    def effect(self, kv: Layers) -> Effect:
        """What these layers do to the tokens after them."""
        mine, theirs = self._logits, self._study.after(kv, self._after)
        kl = torch.empty(len(mine))
        same, nll, counted = 0, 0.0, len(self._after) - 1
        targets = torch.from_numpy(self._after.astype(np.int64))[1:]
        # In pieces: whole distributions in float64 would take gigabytes for a large vocabulary.
        for at in range(0, len(mine), 64):
            a = torch.log_softmax(mine[at : at + 64].double(), -1)
            b = torch.log_softmax(theirs[at : at + 64].double(), -1)
            kl[at : at + 64] = (a.exp() * (a - b)).sum(-1)
            same += int((a.argmax(-1) == b.argmax(-1)).sum())
            true = targets[at : at + 64, None]
            nll += float((a[: len(true)].gather(-1, true) - b[: len(true)].gather(-1, true)).sum())
        return Effect(kl.numpy(), same / len(mine), nll / max(1, counted))


class Study:
    """A loaded model under study. KV crosses as float32 arrays, whatever dtype the model computes in."""

    def __init__(self, loaded: Loaded) -> None:
        self.spec = loaded.spec
        self._model = loaded.model
        self._device = loaded.model.device
        self._dtype = loaded.model.dtype
        parameters = inspect.signature(loaded.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        for layer in self.spec.layers:
            if layer.kind not in ("full", "sliding"):
                raise UnsupportedModel(f"KV of {layer.kind} layers cannot be studied")

    def context(self, tokens: Tokens) -> list[tuple[Array, Array]]:
        """The KV of a context, all tokens of sliding layers too."""
        cache = DynamicCache()
        with torch.inference_mode():
            self._run(tokens, cache, 0, keep=1)
        return [(_array(layer.keys), _array(layer.values)) for layer in _filled(cache)]

    def after(self, kv: Layers, tokens: Tokens) -> Tensor:
        """The logits of `tokens` behind a context with this KV, `[tokens, vocabulary]`."""
        with torch.inference_mode():
            cache = self._cache([(self._tensor(k), self._tensor(v)) for k, v in kv])
            return self._run(tokens, cache, kv[0][0].shape[1], keep=len(tokens)).float()

    def reference(self, kv: Layers, after: Tokens) -> Reference:
        """What to compare changed KV with."""
        return Reference(self, kv, after)

    def gradients(self, kv: Layers, tokens: Tokens, seed: int) -> list[tuple[Array, Array]]:
        """The gradient of the log likelihood of what the model itself would say at each of `tokens`, with
        respect to K and V of the context, shaped as `kv`.

        Squared and averaged it estimates the Fisher information: how much a small error costs in KL.
        """
        layers = [(self._tensor(k).requires_grad_(), self._tensor(v).requires_grad_()) for k, v in kv]
        with torch.enable_grad():
            logits = self._run(tokens, self._cache(layers), kv[0][0].shape[1], keep=len(tokens))
            chosen = torch.log_softmax(logits.float(), -1)
            generator = torch.Generator(device="cpu").manual_seed(seed)
            said = torch.multinomial(chosen.detach().cpu().exp(), 1, generator=generator).to(chosen.device)
            flat = [tensor for pair in layers for tensor in pair]
            # None for what a sliding window hides from all of these tokens.
            found: Sequence[Tensor | None] = torch.autograd.grad(
                chosen.gather(-1, said).sum(), flat, allow_unused=True
            )
        arrays = [
            np.zeros(tuple(tensor.shape[1:]), np.float32) if grad is None else _array(grad)
            for tensor, grad in zip(flat, found, strict=True)
        ]
        return list(zip(arrays[::2], arrays[1::2], strict=True))

    def _run(self, tokens: Tokens, cache: DynamicCache, first: int, *, keep: int) -> Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self._device)
        positions = torch.arange(first, first + len(tokens), device=self._device)[None]
        forward = cast("Callable[..., Any]", self._model)
        more: dict[str, Any] = {self._cache_name: cache}
        found = forward(ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **more)
        logits: Tensor = found.logits[0]
        return logits

    def _cache(self, layers: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
        cache = DynamicCache()
        for index, (k, v) in enumerate(layers):
            cache.update(k, v, index)
        return cache

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))[None].to(self._device, self._dtype)


def _filled(cache: DynamicCache) -> Sequence[Any]:
    layers: Sequence[Any] = cache.layers
    return layers


def _array(tensor: Tensor) -> Array:
    found: Array = tensor[0].detach().float().cpu().numpy()
    return found
