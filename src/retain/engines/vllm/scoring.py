"""Scoring in vLLM: tokens are forced by a logits processor, which also sees what the model said.

In one process: `VLLM_ENABLE_V1_MULTIPROCESSING=0`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.sample.logits_processor import LogitsProcessor

from retain.engines.scoring import Score, Scorer, Text
from retain.engines.transformers.loading import prepared
from retain.handshake import Party
from retain.model import ModelSpec

from . import model as models
from .version import producer


class Forcing(LogitsProcessor):  # type: ignore[misc]
    """Notes the logits of every step and leaves only the token that is to follow."""

    # One engine in a process, one request at a time.
    forced: Sequence[int] = ()
    seen: dict[int, np.ndarray[Any, Any]] = {}  # noqa: RUF012
    said: Sequence[int] = ()
    began = 0.0
    first_seconds = 0.0

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """As vLLM makes them."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep vLLM's own list of what a new request has been answered so far."""
        for _, _, _, said in batch_update.added if batch_update else ():
            Forcing.said = said

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        # A prompt that is prefilled in several steps comes here after each: its last counts.
        step = len(Forcing.said)
        if step >= len(Forcing.forced):
            return logits
        if step == 0:
            Forcing.first_seconds = time.perf_counter() - Forcing.began
        Forcing.seen[step] = logits[0].float().cpu().numpy().copy()
        token = Forcing.forced[step]
        kept = logits[:, token].clone()
        logits.fill_(float("-inf"))
        logits[:, token] = kept
        return logits


@contextmanager
def opened(
    model: str, tiers: Sequence[str], batch: int | None, fidelity: str, options: Mapping[str, Any]
) -> Iterator[Scorer]:
    """An engine over these tiers, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    chosen: dict[str, Any] = {
        "dtype": options.get("dtype", "float32"),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": int(options.get("context", 8192)),
        "kv_cache_memory_bytes": int(options.get("kv_bytes", 600_000_000)),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "max_num_seqs": 1,
        "logits_processors": [Forcing],
    }
    if batch is not None:
        chosen["max_num_batched_tokens"] = batch
        chosen["enable_chunked_prefill"] = True
    if tiers:
        extra = {"tiers": list(tiers), "plan": False, "fidelity": fidelity, "store_generated": False}
        chosen["kv_transfer_config"] = {
            "kv_connector": "RetainConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    llm = LLM(model=str(prepared(model)), **chosen)
    config = llm.llm_engine.vllm_config
    spec = models.spec(config)
    numeric = "float" if config.model_config.quantization is None else "quantised"
    yield _Scorer(llm, Party("vllm", producer(), spec.variant, spec.dtype, numeric), spec)
    # Ended in order, so that what is on its way to a tier comes there.
    llm.llm_engine.engine_core.shutdown()


class _Scorer:
    def __init__(self, llm: Any, party: Party, spec: ModelSpec) -> None:
        self._llm = llm
        self.party = party
        self.spec = spec

    def score(self, text: Text) -> Score:
        parameters = SamplingParams(
            max_tokens=len(text.forced), temperature=0.0, ignore_eos=True, detokenize=False
        )
        before = _loaded_seconds()
        Forcing.forced, Forcing.seen, Forcing.began = text.forced, {}, time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": list(text.prompt)}], parameters, use_tqdm=False)
        cached = outputs[0].num_cached_tokens or 0
        logits = np.stack([Forcing.seen[step] for step in range(len(text.forced))]).astype(np.float32)
        moved = _loaded_seconds() - before
        return Score(logits, {"reused": cached} if cached else {}, Forcing.first_seconds, moved)


def _loaded_seconds() -> float:
    """What the connector's loads have taken so far, from the claim of the blocks to the last copy."""
    if not has_kv_transfer_group():
        return 0.0
    worker = get_kv_transfer_group().shared.worker
    return 0.0 if worker is None else float(worker.counts.loaded_seconds)
