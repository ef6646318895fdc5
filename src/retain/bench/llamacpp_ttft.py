"""Bench ttft --engine llamacpp: Retain beside llama.cpp alone and llama.cpp's own state file, in one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from retain.bench.progress import Steps
from retain.bench.report import Report, Value, spread
from retain.bench.texts import long_prompt
from retain.cache import Cache, open_cache
from retain.engines.llamacpp import Engine, Sampling, attach
from retain.engines.scoring import Logits
from retain.engines.transformers.loading import load_tokenizer
from retain.identity import TAIL_TOKENS, as_tokens

MODEL = "smollm2"
ANSWER_TOKENS = 8
MEMORY = "memory:1GiB"
PAIRS, WARM, RESTARTS = 3, 15, 5


def run(tokens: int = 4096) -> Report:
    """Measure with the packaged SmolLM2 as it is quantised, float16 KV and flash attention: llama.cpp's own
    choices. Everything lies in a temporary folder. llama.cpp's quantised arithmetic depends on how many
    tokens it runs at once, so answers are compared with llama.cpp's own in the same pieces: a cold prompt
    with the whole prompt, kept KV with llama.cpp's own file; of both only the last token is run then.
    """
    with (
        Steps("ttft llamacpp", 2 * PAIRS + 2 * WARM + RESTARTS + 1) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
    ):
        return _Bench(long_prompt(load_tokenizer(MODEL).encode, tokens), Path(folder), steps).report()


class _Bench:
    def __init__(self, prompt: list[int], folder: Path, steps: Steps) -> None:
        self._prompt = prompt
        self._folder = folder
        self._steps = steps
        self._answers: dict[str, set[tuple[int, ...]]] = {"whole": set(), "resumed": set()}
        self._reused = True

    def report(self) -> Report:
        taken: dict[str, list[float]] = {name: [] for name in ("alone", "miss", "memory", "file", "disk")}
        with self._opened() as (cache, engine):
            self._alone(engine)
            self._steps.step("warming up")
            for pair in range(PAIRS):
                for name in ("alone", "miss")[:: -1 if pair % 2 else 1]:
                    taken[name].append(self._alone(engine) if name == "alone" else self._miss(cache, engine))
                    self._steps.step("nothing kept yet" if name == "miss" else "llama.cpp alone")
            path = str(self._folder / "state")
            self._save(engine, path)
            for turn in range(WARM):
                for name in ("memory", "file")[:: -1 if turn % 2 else 1]:
                    taken[name].append(
                        self._kept(engine, "memory") if name == "memory" else self._file(engine, path)
                    )
                    self._steps.step("from memory" if name == "memory" else "llama.cpp's own file")
            cache.flush()
        for _ in range(RESTARTS):
            with self._opened() as (_, engine):
                taken["disk"].append(self._kept(engine, "disk"))
            self._steps.step("after a restart")
        middle = {name: median(seconds) for name, seconds in taken.items()}
        rows = [
            self._row("cold: llama.cpp alone", taken["alone"]),
            self._row("cold: nothing kept yet", taken["miss"]),
            self._row("from memory", taken["memory"]),
            self._row("restarted, from disk", taken["disk"]),
            self._row("llama.cpp restores its own file", taken["file"]),
        ]
        ratios = {
            "llamacpp.cold_over_memory": middle["miss"] / middle["memory"],
            "llamacpp.cold_over_restart": middle["miss"] / middle["disk"],
            "llamacpp.memory_over_own_file": middle["memory"] / middle["file"],
            "llamacpp.memory_over_own_file_least": min(taken["memory"]) / min(taken["file"]),
            "llamacpp.miss_overhead": middle["miss"] / middle["alone"] - 1,
        }
        checks = {
            "text_equal": all(len(answers) == 1 for answers in self._answers.values()),
            "reused": self._reused,
        }
        return Report("ttft-llamacpp", rows, ratios, checks)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Cache, Engine]]:
        with (
            open_cache(MEMORY, f"disk:{self._folder / 'kv'}") as cache,
            attach(MODEL, cache) as engine,
        ):
            yield cache, engine

    def _alone(self, engine: Engine) -> float:
        """The prompt in llama.cpp's own batches, until the logits of its last token are there."""
        return self._first(
            engine,
            "whole",
            lambda number: engine.host.prefill(number, as_tokens(self._prompt), 0, 1, lambda done: None),
        )

    def _save(self, engine: Engine, path: str) -> None:
        with engine.host.sequence(lambda: False) as number:
            engine.host.prefill(number, as_tokens(self._prompt[:-1]), 0, 1, lambda done: None)
            engine.host.save_file(number, path)

    def _file(self, engine: Engine, path: str) -> float:
        def restore(number: int) -> Logits:
            if not engine.host.load_file(number, path):
                raise AssertionError("llama.cpp does not read its own file")
            return engine.host.run(number, self._prompt[-1:], len(self._prompt) - 1)

        return self._first(engine, "resumed", restore)

    def _first(self, engine: Engine, way: str, work: Callable[[int], Logits]) -> float:
        with engine.host.sequence(lambda: False) as number:
            began = time.perf_counter()
            logits = work(number)
            seconds = time.perf_counter() - began
            answer = [int(logits[-1].argmax())]
            while len(answer) < ANSWER_TOKENS:
                at = len(self._prompt) + len(answer) - 1
                answer.append(int(engine.host.run(number, answer[-1:], at)[-1].argmax()))
            self._answers[way].add(tuple(answer))
            return seconds

    def _miss(self, cache: Cache, engine: Engine) -> float:
        cache.clear()
        return self._ask(engine, "whole")[0]

    def _kept(self, engine: Engine, tier: str) -> float:
        seconds, reused = self._ask(engine, "resumed")
        whole = (len(self._prompt) - 1) // TAIL_TOKENS * TAIL_TOKENS
        self._reused = self._reused and reused.get(tier, 0) >= whole
        return seconds

    def _ask(self, engine: Engine, way: str) -> tuple[float, dict[str, int]]:
        began = time.perf_counter()
        with engine.stream(self._prompt, Sampling(max_tokens=ANSWER_TOKENS), stop=()) as generation:
            answer = [next(generation).token]
            seconds = time.perf_counter() - began
            answer.extend(step.token for step in generation)
        engine.settle()
        self._answers[way].add(tuple(answer))
        return seconds, dict(generation.report.reused)

    def _row(self, what: str, seconds: Sequence[float]) -> dict[str, Value]:
        return {"what": what, "prompt_tokens": len(self._prompt), **spread(seconds)}
