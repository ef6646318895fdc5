"""Answers: what was generated lately, to tell when the next turn of a conversation renders it differently."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from retain.identity import TAIL_TOKENS, Chain, Tokens

REMEMBERED = 64


class Answers:
    """The token ids of the last sequences that had an answer, by space. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[bytes, int, Tokens]] = deque(maxlen=REMEMBERED)

    def remember(self, prompt: Chain, tokens: Tokens) -> None:
        """A prompt was answered: `tokens` are prompt and answer, as far as their KV was computed."""
        if tokens.size > prompt.tokens.size:
            with self._lock:
                self._kept.append((prompt.space, int(prompt.tokens.size), tokens))

    def lost(self, prompt: Chain) -> int:
        """How many tokens of an earlier answer lie behind the first that this prompt, which goes on from it,
        has not.

        A prompt goes on from an answer if it agrees with all of that answer's prompt, but for the last few
        tokens: a template may open the answer in other words than it renders it in later.
        """
        with self._lock:
            kept = list(self._kept)
        lost = longest = 0
        for space, asked, tokens in kept:
            if space != prompt.space:
                continue
            common = _common(tokens, prompt.tokens)
            if max(longest, asked - TAIL_TOKENS, 1) <= common < prompt.tokens.size:
                longest, lost = common, int(tokens.size) - common
        return lost


def _common(a: Tokens, b: Tokens) -> int:
    size = min(a.size, b.size)
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if differing.size else int(size)
