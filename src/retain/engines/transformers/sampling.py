"""Sampling: which token comes next, from the logits of the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.errors import UnsupportedInput


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. Temperature 0 takes the most likely; `top_logprobs` None gives no logprobs at
    all."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UnsupportedInput(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UnsupportedInput(f"temperature must be a number from 0 up, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UnsupportedInput(f"top_p must lie above 0 and up to 1, got {self.top_p}")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise UnsupportedInput(f"top_logprobs must be 0 or more, got {self.top_logprobs}")


@dataclass(frozen=True)
class Step:
    """One token of an answer. `finish` is "stop" or "length" on the last one, else None.

    `logprob` and `top` (token, logprob; likeliest first) are of the model's own distribution, before
    temperature.
    """

    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one token after the other, with a random generator of its own: equal seeds give equal
    answers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed & (2**63 - 1))

    def choose(self, logits: Tensor) -> Step:
        """The next token from `[vocabulary]` logits."""
        scores = logits.detach().float().cpu()
        token = self._greedy(scores) if self.sampling.temperature == 0 else self._drawn(scores)
        if self.sampling.top_logprobs is None:
            return Step(token)
        logprobs = torch.log_softmax(scores, -1)
        best = torch.topk(logprobs, min(self.sampling.top_logprobs, logprobs.numel()))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Step(token, None, float(logprobs[token]), top)

    def _greedy(self, scores: Tensor) -> int:
        return int(scores.argmax())

    def _drawn(self, scores: Tensor) -> int:
        # Dividing by a temperature near zero would overflow to inf - inf; the largest score is taken off
        # first.
        shares = torch.softmax((scores - scores.max()).double() / self.sampling.temperature, -1)
        if self.sampling.top_p < 1:
            ordered, order = shares.sort(descending=True, stable=True)
            outside = ordered.cumsum(0) - ordered >= self.sampling.top_p
            shares = shares.index_fill(0, order[outside], 0.0)
        return int(torch.multinomial(shares, 1, generator=self._generator))
