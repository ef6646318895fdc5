"""Bench ttft --engine vllm: Retain beside vLLM's own prefix cache and LMCache, in one run."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from retain.bench.lmcache import LMCacheServer
from retain.bench.progress import Steps
from retain.bench.report import Report, Value, spread
from retain.bench.server import OwnDaemons
from retain.bench.texts import long_prompt
from retain.bench.vllm_trial import Trial, beside, cpu_seconds
from retain.daemon.client import RemoteCache
from retain.daemon.start import connect

MODEL = "smollm2"
ANSWER_TOKENS = 16
WARM_ROUNDS = 5
PAIRS = 5
CONCURRENT, CONCURRENT_TOKENS = 8, 1024
STORED_SECONDS = 0.6
"""What it takes to see that everything is stored: as long a rest for the engine that stores nothing."""

HELD = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"})
OTHER_LENGTHS = (-1, 132)
"""Beside the length asked for: one token less, where vLLM reuses a block less, and a part of a block more."""

Prompts = dict[int, list[int]]


def run(tokens: int, peers: str | None) -> Report:
    """Measure with SmolLM2 in float32. `peers` is the Python of a venv with LMCache; by default that of
    `.venv-peers` beside this one, and where there is none LMCache is left out.
    """
    peers = peers or beside(".venv-peers")
    lengths = [tokens, *(tokens + other for other in OTHER_LENGTHS)]
    total = 7 + 2 * PAIRS + (1 if peers else 0)
    with (
        Steps("ttft vllm", total) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
        OwnDaemons() as daemons,
    ):
        return _Bench(Path(folder), daemons, lengths, steps, peers).report()


class _Bench:
    def __init__(
        self, folder: Path, daemons: OwnDaemons, lengths: Sequence[int], steps: Steps, peers: str | None
    ) -> None:
        from retain.engines.transformers.loading import load_tokenizer, prepared

        encode = load_tokenizer(MODEL).encode
        self._model = str(prepared(MODEL))
        self._folder = folder
        self._daemons = daemons
        self._steps = steps
        self._peers = peers
        self._prompts: Prompts = {n: long_prompt(encode, n) for n in lengths}
        self._tiers = ["memory:1GiB", f"disk:{folder / 'kv'}?capacity=4GiB"]
        self._expected: dict[int, tuple[int, ...]] = {}
        self._equal = True
        self._rows: list[dict[str, Value]] = []
        self._warm: dict[str, dict[int, float]] = {}
        self._store_seconds: dict[str, float] = {}

    def report(self) -> Report:
        self._prefix_cache()
        self._retain()
        if self._peers is not None:
            self._lmcache(self._peers)
        ratios = self._misses()
        length = next(iter(self._prompts))
        own = self._warm["vLLM's own prefix cache"][length]
        for name, what in (
            ("vllm.warm_over_prefix_cache", "Retain, same process"),
            ("vllm.fresh_over_prefix_cache", "Retain, fresh engine, daemon running"),
            ("vllm.restart_over_prefix_cache", "Retain, everything restarted, from disk"),
        ):
            ratios[name] = self._warm[what][length] / own
        if self._peers is not None:
            ratios["vllm.lmcache_over_warm"] = (
                self._warm["LMCache, same process"][length] / self._warm["Retain, same process"][length]
            )
            ratios["vllm.lmcache_store_over_retain"] = (
                self._store_seconds["LMCache"] / self._store_seconds["Retain"]
            )
        return Report("ttft-vllm", self._rows, ratios, {"text_equal": self._equal})

    def _prefix_cache(self) -> None:
        with self._engine({"enable_prefix_caching": True}, {}) as engine:
            self._cold("cold: vLLM alone", engine)
            self._expected = {n: engine.ask([p], ANSWER_TOKENS).answers[0] for n, p in self._prompts.items()}
            self._reuse("vLLM's own prefix cache", engine, WARM_ROUNDS)
        self._steps.step("vLLM's own prefix cache")

    def _retain(self) -> None:
        with self._with_retain() as engine:
            self._cold("cold: Retain, nothing kept", engine)
            self._wait_stored(engine)
            self._stored(
                "Retain",
                *(
                    engine.metric(f"vllm:retain_save_{what}_total")
                    for what in ("tokens", "seconds", "cpu_seconds")
                ),
            )
            self._reuse("Retain, same process", engine, WARM_ROUNDS)
        self._steps.step("Retain, warm")
        with self._with_retain() as engine:
            engine.ask([[5] * 40])
            self._reuse("Retain, fresh engine, daemon running", engine, 1)
        self._steps.step("Retain, fresh engine")
        self._daemons.stop()
        with self._with_retain() as engine:
            engine.ask([[5] * 40])
            self._reuse("Retain, everything restarted, from disk", engine, 1)
        self._steps.step("Retain, restarted")

    def _lmcache(self, python: str) -> None:
        with LMCacheServer(python, self._folder) as server:
            options = {"enable_prefix_caching": False, "kv_transfer_config": server.connector}
            with self._engine(options, server.environment, python, server.program) as engine:
                self._cold("cold: LMCache, nothing kept", engine)
                engine.ask([[5] * 40])
                time.sleep(5)
                self._stored("LMCache", *server.stored())
                self._reuse("LMCache, same process", engine, WARM_ROUNDS)
        self._steps.step("LMCache")

    def _misses(self) -> dict[str, float]:
        """Prompts that nobody kept, eight at a time, with Retain and without, in turn."""
        seconds: list[float] = []
        cpu: list[float] = []
        draw = random.Random(0)
        with ExitStack() as stack:
            plain = stack.enter_context(self._engine({"enable_prefix_caching": False}, {}))
            kept = stack.enter_context(self._with_retain())
            for engine in (plain, kept):
                engine.ask(self._random(draw))
            for _ in range(PAIRS):
                prompts = self._random(draw)
                found = []
                for engine in (plain, kept) if draw.random() < 0.5 else (kept, plain):
                    began = engine.cpu_seconds() + (self._daemon_cpu() if engine is kept else 0.0)
                    told = engine.ask(prompts)
                    if engine is kept:
                        self._wait_stored(engine)
                    else:
                        engine.ask([[5] * 40])  # as above
                        time.sleep(STORED_SECONDS)
                    used = engine.cpu_seconds() + (self._daemon_cpu() if engine is kept else 0.0) - began
                    found.append((engine is kept, told.seconds, used))
                    self._steps.step("prompts that nobody kept")
                by = {is_kept: (wall, used) for is_kept, wall, used in found}
                seconds.append(by[True][0] / by[False][0] - 1)
                cpu.append(by[True][1] / by[False][1] - 1)
                self._rows.append(_pair(by))
        return {
            "vllm.miss_overhead": median(seconds),
            "vllm.miss_overhead_cpu": median(cpu),
            "vllm.memory_overhead_mib": self._memory(),
        }

    def _memory(self) -> float:
        """MiB that the engine's processes have with Retain over those without.

        The allocator gives large blocks back at once here (HELD): what it would otherwise keep for later
        differs by more than a hundred MiB from one start of the same engine to the next.
        """
        held = []
        for engine in (self._engine({"enable_prefix_caching": False}, HELD), self._with_retain(HELD)):
            with engine:
                for _ in range(2):
                    engine.ask(self._random(random.Random(1)))
                held.append(engine.own_bytes())
        self._steps.step("memory")
        return (held[1] - held[0]) / (1 << 20)

    def _random(self, draw: random.Random) -> list[list[int]]:
        return [[draw.randrange(1000, 40_000) for _ in range(CONCURRENT_TOKENS)] for _ in range(CONCURRENT)]

    # engines

    def _with_retain(self, environment: Mapping[str, str] = MappingProxyType({})) -> Trial:
        connector = {
            "kv_connector": "RetainConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": ["daemon", *self._tiers]},
        }
        options = {"enable_prefix_caching": False, "kv_transfer_config": connector}
        return self._engine(options, {**self._daemons.environment, **environment})

    def _engine(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        python: str | None = None,
        program: Sequence[str] | None = None,
    ) -> Trial:
        base = {
            "model": self._model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 8192,
            "kv_cache_memory_bytes": 800_000_000,
            "disable_log_stats": False,
        }
        chosen: dict[str, Any] = (
            {} if python is None or program is None else {"python": python, "program": program}
        )
        return Trial({**base, **options}, environment, self._folder / "engine.log", **chosen)

    def _daemon(self) -> RemoteCache:
        return connect(self._tiers, client="bench", start=False)

    def _wait_stored(self, engine: Trial) -> None:
        """Until what the engine computed lies in the tiers: it stores behind its answers."""
        engine.ask([[5] * 40])
        with self._daemon() as daemon:
            before = -1
            while (now := daemon.stats().counters["stored_blocks"]) != before or not daemon.flush(60):
                before = now
                time.sleep(0.3)

    def _daemon_cpu(self) -> float:
        with self._daemon() as daemon:
            state = daemon.state()
        return 0.0 if state is None else cpu_seconds(state.pid)

    # rows

    def _stored(self, what: str, tokens: float, seconds: float, cpu_seconds: float | None = None) -> None:
        """What `tokens` tokens took to be stored while others were computed, by the counters or the log of
        whoever stored them.
        """
        length = next(iter(self._prompts))
        self._store_seconds[what] = seconds * length / tokens if tokens else math.nan
        row: dict[str, Value] = {
            "what": f"stored by {what}, as it says itself",
            "prompt_tokens": length,
            "stored_tokens": int(tokens),
            "store_seconds": self._store_seconds[what],
            "store_cpu_seconds": None if cpu_seconds is None else cpu_seconds * length / tokens,
        }
        self._rows.append(row)

    def _cold(self, what: str, engine: Trial) -> None:
        """The first length is cold; the others begin as it does, and are asked so that they are kept."""
        engine.ask([[7] * 300])
        told = [(length, engine.ask([prompt])) for length, prompt in self._prompts.items()]
        length, first = told[0]
        self._row(what, length, [first.seconds], first.cached[0])

    def _reuse(self, what: str, engine: Trial, rounds: int) -> None:
        for length, prompt in self._prompts.items():
            told = [engine.ask([prompt]) for _ in range(rounds)]
            answer = engine.ask([prompt], ANSWER_TOKENS).answers[0]
            self._equal = self._equal and answer == self._expected[length]
            seconds = [each.seconds for each in told]
            self._warm.setdefault(what, {})[length] = median(seconds)
            self._row(what, length, seconds, told[0].cached[0])

    def _row(self, what: str, length: int, seconds: Sequence[float], cached: int) -> None:
        self._rows.append({"what": what, "prompt_tokens": length, "reused_tokens": cached, **spread(seconds)})


def _pair(by: Mapping[bool, tuple[float, float]]) -> dict[str, Value]:
    """A row: eight prompts that nobody kept, by whether Retain was there (wall and CPU seconds)."""
    return {
        "what": "eight prompts that nobody kept: Retain over vLLM alone",
        "prompt_tokens": CONCURRENT_TOKENS,
        "seconds_ratio": by[True][0] / by[False][0],
        "cpu_ratio": by[True][1] / by[False][1],
    }
