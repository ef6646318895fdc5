"""Sampling: which token comes next, from the logits of the last one."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.engines.wishes import Sampling, Step


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
