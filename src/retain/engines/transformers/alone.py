"""A transformers model without Retain: what an attached one is measured against."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

Logits = npt.NDArray[np.float32]


class Alone:
    """A model, run as transformers runs it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # transformers is renaming the argument, and warns of the old name.
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def first_token(self, tokens: Sequence[int]) -> int:
        """Prefill a prompt and choose the likeliest next token."""
        return int(self._logits(tokens, None).argmax())

    def answer(self, tokens: Sequence[int], count: int) -> tuple[tuple[int, ...], Logits]:
        """The greedy answer of `count` tokens, and the logits `[vocabulary]` of its first."""
        prompt = torch.tensor([list(tokens)])
        with torch.inference_mode():
            found = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return tuple(found.sequences[0, len(tokens) :].tolist()), found.logits[0][0].float().numpy()

    def prefill(self, tokens: Sequence[int]) -> DynamicCache:
        """The KV of a prompt, in a cache of transformers' own."""
        cache = DynamicCache(config=self._model.config)
        self._logits(tokens, cache)
        return cache

    def next_token(self, cache: DynamicCache, token: int) -> int:
        """One step behind a copy of `cache`: reuse as the engine alone can have it, within its process."""
        return int(self._logits([token], copy.deepcopy(cache)).argmax())

    def score(self, tokens: Sequence[int], keep: int, batch: int) -> Logits:
        """The logits `[keep, vocabulary]` of a prompt's last tokens, computed in pieces of `batch`; those
        last ones in one."""
        cache = DynamicCache(config=self._model.config)
        whole = len(tokens) - keep
        edges = [*range(0, whole, batch), whole] if whole else [0]
        with torch.inference_mode():
            for start, end in pairwise(edges):
                self._logits(tokens[start:end], cache)
            more: dict[str, Any] = {self._cache_name: cache}
            output = self._model(input_ids=torch.tensor([list(tokens[whole:])]), use_cache=True, **more)
        found: Logits = output.logits[0].float().numpy()
        return found

    def _logits(self, tokens: Sequence[int], cache: DynamicCache | None) -> torch.Tensor:
        more: dict[str, Any] = {self._cache_name: cache}
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1, **more
            )
        logits: torch.Tensor = output.logits[0, -1]
        return logits
