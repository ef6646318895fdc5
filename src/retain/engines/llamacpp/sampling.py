"""Sampling: which token comes next, from the logits of the last one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retain.engines.wishes import Sampling, Step

Logits = npt.NDArray[np.float32]


class Sampler:
    """Chooses one token after the other, with a random generator of its own: equal seeds give equal
    answers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        seed = sampling.seed
        self._generator = np.random.default_rng(None if seed is None else seed & (2**63 - 1))

    def choose(self, logits: Logits) -> Step:
        """The next token from `[vocabulary]` logits."""
        token = int(logits.argmax()) if self.sampling.temperature == 0 else self._drawn(logits)
        if self.sampling.top_logprobs is None:
            return Step(token)
        logprobs = log_softmax(logits)
        count = min(self.sampling.top_logprobs, logprobs.size)
        best = np.argsort(-logprobs, kind="stable")[:count]
        top = tuple((int(each), float(logprobs[each])) for each in best)
        return Step(token, None, float(logprobs[token]), top)

    def _drawn(self, logits: Logits) -> int:
        # Dividing by a temperature near zero would overflow; the largest score is taken off first.
        scores = (logits.astype(np.float64) - float(logits.max())) / self.sampling.temperature
        shares = np.exp(scores)
        shares /= shares.sum()
        if self.sampling.top_p < 1:
            order = np.argsort(-shares, kind="stable")
            before = np.cumsum(shares[order]) - shares[order]
            shares[order[before >= self.sampling.top_p]] = 0.0
        ahead = np.cumsum(shares)
        drawn = self._generator.random() * ahead[-1]
        return int(np.searchsorted(ahead, drawn, side="right").clip(0, shares.size - 1))


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Log probabilities of logits, along the last axis."""
    scores = logits.astype(np.float64)
    scores = scores - scores.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return found
