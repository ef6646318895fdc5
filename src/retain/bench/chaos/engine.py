"""vLLM killed while it answers, stores and loads: the next one answers the same, from what was kept."""

from __future__ import annotations

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from retain.bench.chaos.client import DEADLINES
from retain.bench.chaos.crew import Seen
from retain.bench.chaos.faults import Fault
from retain.bench.chaos.run import Outcome
from retain.bench.server import OwnDaemons
from retain.bench.vllm_trial import Told, Trial, TrialError
from retain.daemon.client import RemoteCache
from retain.daemon.start import connect

ENGINE_KILLS = 5
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 600, 8
ANSWER_SECONDS = DEADLINES["answer"]

SETTLE_SECONDS = 20.0

_MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, vocab_size=512, max_position_embeddings=4096,
    tie_word_embeddings=False, initializer_range=0.15,
)
transformers.LlamaForCausalLM(config).float().save_pretrained(sys.argv[1])
"""


def _by_itself(_: object) -> None:
    raise NotImplementedError("an engine is killed by kill_engines")


ENGINE_FAULT = Fault("vllm", "kill -9 of the engine", lambda scale: ENGINE_KILLS, _by_itself)


def kill_engines(python: str, kills: int, seed: int, said: Callable[[str, int], object]) -> Outcome:
    """Start an engine, kill it at a random point, and look what is left, `kills` times.

    `python` is that of a venv with vLLM and Retain.
    """
    began = time.monotonic()
    said(f"{ENGINE_FAULT.title}: a model and what it answers", 0)
    with tempfile.TemporaryDirectory(prefix="retain-chaos-") as folder, OwnDaemons() as daemons:
        return _Engines(python, Path(folder), daemons, random.Random(seed)).killed(kills, said, began)


class _Engines:
    def __init__(self, python: str, folder: Path, daemons: OwnDaemons, dice: random.Random) -> None:
        subprocess.run([python, "-c", _MODEL, str(folder / "model")], check=True, capture_output=True)
        self._python = python
        self._folder = folder
        # One thread: the model is small, and threads that spin while they wait for each other take a busy
        # machine from everything else.
        self._environment = daemons.environment | {"OMP_NUM_THREADS": "1"}
        self._dice = dice
        self._tiers = ["memory:64MiB", f"disk:{folder / 'kept'}?capacity=256MiB"]
        self._prompts = [[dice.randrange(512) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        self._seen = Seen()
        self._held: list[str] = []

    def killed(self, kills: int, said: Callable[[str, int], object], began: float) -> Outcome:
        with self._engine(()) as engine:
            self._right = engine.ask(self._prompts, ANSWER_TOKENS).answers
        reused = 0
        for number in range(kills):
            with self._engine(["daemon", *self._tiers]) as engine:
                reused += sum(self._check(engine.ask(self._prompts[:2], ANSWER_TOKENS), 0).cached)
                self._kill_at_work(engine)
            with connect(self._tiers, client="observer") as observer:
                self._held += self._left(observer)
            said(f"{ENGINE_FAULT.title}, {number + 1}", 1)
        seconds = time.monotonic() - began
        return Outcome(ENGINE_FAULT, kills, seconds, self._seen, self._held, back=reused > 0)

    def _kill_at_work(self, engine: Trial) -> None:
        """Kill the engine at some point of a batch; what it answered before has to be right."""

        def ask() -> None:
            with suppress(TrialError, OSError):
                while True:
                    first = self._dice.randrange(PROMPTS - 2)
                    self._check(engine.ask(self._prompts[first : first + 3], ANSWER_TOKENS), first)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        time.sleep(self._dice.uniform(0.05, 3.0))
        engine.kill()
        asking.join(ANSWER_SECONDS)
        if asking.is_alive():
            self._seen.late.append("a killed engine is still waited for")

    def _check(self, told: Told, first: int) -> Told:
        seen = self._seen
        seen.counts["lookups"] += len(told.answers)
        seen.counts["blocks"] += sum(cached // 128 for cached in told.cached)
        seen.waits["answer"] = max(seen.waits.get("answer", 0.0), told.seconds)
        if told.seconds > ANSWER_SECONDS:
            seen.late.append(f"an answer took {told.seconds:.1f} s of {ANSWER_SECONDS:.0f} s")
        for number, answer in enumerate(told.answers, first):
            if answer != self._right[number]:
                seen.wrong.append(f"prompt {number}: {answer} instead of {self._right[number]}")
        return told

    def _left(self, observer: RemoteCache) -> list[str]:
        """What the daemon still holds for an engine that is dead."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = []
            state = observer.state()
            if state is None:
                found.append("the daemon does not answer")
            else:
                counts = {
                    "leases": sum(tier[5] for tier in state.tiers),
                    "writes": state.pending,
                    "temporary bytes": state.temporary,
                    "sessions": state.sessions - 1,
                }
                found += [f"{number} {what}" for what, number in counts.items() if number]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def _engine(self, tiers: Sequence[str]) -> Trial:
        options: dict[str, Any] = {
            "model": str(self._folder / "model"),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 100_000_000,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        if tiers:
            options["kv_transfer_config"] = {
                "kv_connector": "RetainConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"plan": False, "tiers": list(tiers)},
            }
        return Trial(options, self._environment, self._folder / "engine.log", self._python)
