"""Wishes: how an answer's tokens are to be chosen, and what each step of one tells."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
