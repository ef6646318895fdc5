"""Bench `ttft`: time to the first token of a long prompt: cold, kept, restarted; and what a miss costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from retain.bench.clock import Sample, timed
from retain.bench.files import forget
from retain.bench.progress import Steps
from retain.bench.report import Report, Value, new_figure, spread
from retain.bench.texts import long_prompt
from retain.cache import Cache, open_cache
from retain.engines.transformers import Engine, Sampling, attach
from retain.engines.transformers.alone import Alone, Logits
from retain.engines.transformers.loading import Loaded, load
from retain.identity import TAIL_TOKENS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "smollm2"
ANSWER_TOKENS = 8
LOGIT_TOLERANCE = 1e-4
MEMORY = "memory:1GiB"


@dataclass(frozen=True)
class Rounds:
    """How often each part is measured; medians are reported."""

    pairs: int = 5
    warm: int = 15
    restarts: int = 7
    cold_restarts: int = 3
    processes: int = 1

    @property
    def total(self) -> int:
        return 2 * self.pairs + 2 * self.warm + self.restarts + self.cold_restarts + self.processes


@dataclass(frozen=True)
class Run:
    """One request: the sample up to its first token, the answer, and where the prompt's tokens came from."""

    first: Sample
    answer: tuple[int, ...]
    reused: dict[str, int]


def run(tokens: int = 4096, rounds: Rounds | None = None) -> Report:
    """Measure with SmolLM2 in float32 and a prompt of `tokens` tokens, in a temporary folder."""
    chosen = rounds or Rounds()
    with (
        Steps("ttft", chosen.total + 1) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
    ):
        steps.step("loading the model", 0)
        loaded = load(MODEL)
        prompt = long_prompt(loaded.tokenizer.encode, tokens)
        return _Bench(loaded, prompt, Path(folder), chosen, steps).report()


class _Bench:
    def __init__(self, loaded: Loaded, prompt: list[int], folder: Path, rounds: Rounds, steps: Steps) -> None:
        self._loaded = loaded
        self._prompt = prompt
        self._disk = folder / "kv"
        self._rounds = rounds
        self._steps = steps
        self._alone = Alone(loaded.model)
        self._logit_difference = 0.0
        self._expected: tuple[int, ...] = ()
        self._equal = True
        self._from: dict[str, bool] = {}

    def report(self) -> Report:
        with self._open() as cache, self._attach(cache) as engine:
            self._steps.step("warming up", 0)
            self._warm_up(engine)
            cache.clear()
            self._expected, logits = self._alone.answer(self._prompt, ANSWER_TOKENS)
            misses, plains, totals = self._pairs(cache, engine)
            memory = self._repeat("from memory", self._rounds.warm, lambda: self._ask(engine), "memory")
            self._compare(engine, logits)
        restarts = self._restarts(self._rounds.restarts, "after a restart")
        cold_restarts = self._restarts(self._rounds.cold_restarts, "after a restart, page cache cold", forget)
        with self._open() as cache, self._attach(cache) as engine:
            self._compare(engine, logits)
        processes = [self._process() for _ in range(self._rounds.processes)]
        floor = self._floor()
        cold = median(sample.seconds for sample in misses)
        paired = list(zip(misses, plains, totals, strict=True))
        rows = [
            self._row("cold: the model alone", [sample.seconds for sample in plains]),
            self._row("cold: nothing kept yet", [sample.seconds for sample in misses]),
            self._row("from memory", memory),
            self._row("restarted, from disk", restarts),
            self._row("restarted, from disk, page cache cold", cold_restarts),
            self._row("new process, from disk", processes),
            self._row("floor: the engine copies its own DynamicCache", floor),
        ]
        for row in rows:
            row["speedup"] = cold / float(row["ttft_seconds"] or 1)
        ratios = {
            "ttft.cold_over_memory": cold / median(memory),
            "ttft.cold_over_restart": cold / median(restarts),
            "ttft.floor_over_memory": median(floor) / median(memory),
            "ttft.miss_overhead": median(miss.seconds / plain.seconds for miss, plain, _ in paired) - 1,
            "ttft.miss_overhead_cpu": median(m.cpu_seconds / plain.cpu_seconds for m, plain, _ in paired) - 1,
            "ttft.miss_overhead_total": median(t / plain.cpu_seconds for _, plain, t in paired) - 1,
            "ttft.logit_difference": self._logit_difference,
        }
        checks = {
            "text_equal": self._equal,
            "logits_close": self._logit_difference <= LOGIT_TOLERANCE,
            **{f"reused_from_{tier}": passed for tier, passed in self._from.items()},
        }
        return Report("ttft", rows, ratios, checks)

    def _open(self) -> Cache:
        return open_cache(MEMORY, f"disk:{self._disk}")

    def _attach(self, cache: Cache) -> Engine:
        return attach(self._loaded.model, self._loaded.tokenizer, cache, spec=self._loaded.spec)

    def _warm_up(self, engine: Engine) -> None:
        """Have the libraries do what they do only once, and touch the arena's pages."""
        self._alone.first_token(self._prompt)
        ask(engine, self._prompt, 1)
        engine.settle()

    def _pairs(self, cache: Cache, engine: Engine) -> tuple[list[Sample], list[Sample], list[float]]:
        """Misses beside the model alone, taking turns at being first; the last miss is kept.

        Returns the samples up to the first token, and the CPU seconds of each miss with all storing done.
        """
        misses: list[Sample] = []
        plains: list[Sample] = []
        totals: list[float] = []

        def miss() -> None:
            cache.clear()
            start = time.process_time()
            misses.append(ask(engine, self._prompt, 1).first)
            engine.settle()
            cache.flush()
            totals.append(time.process_time() - start)

        def plain() -> None:
            plains.append(timed(lambda: self._alone.first_token(self._prompt)))

        for pair in range(self._rounds.pairs):
            for work, text in ((miss, "nothing kept yet"), (plain, "the model alone"))[
                :: -1 if pair % 2 else 1
            ]:
                self._steps.step(text, 0)
                work()
                self._steps.step(text)
        return misses, plains, totals

    def _ask(self, engine: Engine) -> Run:
        found = ask(engine, self._prompt, ANSWER_TOKENS)
        engine.settle()
        return found

    def _repeat(self, text: str, times: int, work: Callable[[], Run], tier: str) -> list[float]:
        seconds = []
        for _ in range(times):
            self._steps.step(text, 0)
            found = work()
            seconds.append(found.first.seconds)
            self._equal = self._equal and found.answer == self._expected
            whole = found.reused.get(tier, 0) >= (len(self._prompt) - 1) // TAIL_TOKENS * TAIL_TOKENS
            self._from[tier] = self._from.get(tier, True) and whole
            self._steps.step(text)
        return seconds

    def _compare(self, engine: Engine, logits: Logits) -> None:
        """The next token's logits on kept KV beside those of the model alone."""
        found = engine.forward(np.array([self._prompt])).logits[0, -1].numpy()
        self._logit_difference = max(self._logit_difference, float(np.abs(found - logits).max()))

    def _restarts(
        self, times: int, text: str, before: Callable[[Path], object] = lambda path: None
    ) -> list[float]:
        def restarted() -> Run:
            for path in self._disk.rglob("*"):
                if path.is_file():
                    before(path)
            with self._open() as cache, self._attach(cache) as engine:
                return self._ask(engine)

        return self._repeat(text, times, restarted, "disk")

    def _process(self) -> float:
        self._steps.step("in a new process", 0)
        command = [sys.executable, "-m", "retain.bench.ttft", str(self._disk), str(len(self._prompt))]
        told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        self._equal = self._equal and tuple(told["answer"]) == self._expected
        self._steps.step("in a new process")
        return float(told["seconds"])

    def _floor(self) -> list[float]:
        """What reuse costs the engine alone: a copy of its DynamicCache in the same process, and one step."""
        kept = self._alone.prefill(self._prompt[:-1])
        seconds = []
        for _ in range(self._rounds.warm):
            self._steps.step("the engine's own copy", 0)
            sample = timed(lambda: self._alone.next_token(kept, self._prompt[-1]))
            seconds.append(sample.seconds)
            self._steps.step("the engine's own copy")
        return seconds

    def _row(self, what: str, seconds: Sequence[float]) -> dict[str, Value]:
        return {"what": what, "prompt_tokens": len(self._prompt), **spread(seconds)}


def ask(engine: Engine, prompt: Sequence[int], answer_tokens: int) -> Run:
    """One greedy request, timed up to its first token."""
    cpu, wall = time.process_time(), time.perf_counter()
    with engine.stream(prompt, Sampling(max_tokens=answer_tokens), stop=()) as generation:
        answer = [next(generation).token]
        first = Sample(time.perf_counter() - wall, time.process_time() - cpu)
        answer.extend(step.token for step in generation)
    return Run(first, tuple(answer), dict(generation.report.reused))


def main() -> None:
    """In a new process: one request on what a disk tier keeps. Arguments: its folder, the prompt's length."""
    folder, tokens = sys.argv[1], int(sys.argv[2])
    loaded = load(MODEL)
    prompt = long_prompt(loaded.tokenizer.encode, tokens)
    with (
        open_cache(MEMORY, f"disk:{folder}") as cache,
        attach(loaded.model, loaded.tokenizer, cache, spec=loaded.spec) as engine,
    ):
        found = ask(engine, prompt, ANSWER_TOKENS)
    print(json.dumps({"seconds": found.first.seconds, "answer": found.answer}))


def plot(report: Report) -> Figure:
    """Time to the first token on a logarithmic scale, one bar a row."""
    figure, axes = new_figure(9.0, 3.8)
    names = [str(row["what"]) for row in report.rows][::-1]
    seconds = [float(row["ttft_seconds"] or 0) for row in report.rows][::-1]
    colors = ["#b8bec9" if name.startswith(("cold", "floor")) else "#1f77d0" for name in names]
    bars = axes.barh(names, seconds, color=colors)
    axes.bar_label(bars, [f"{value * 1e3:,.0f} ms" for value in seconds], padding=4, color="0.25")
    axes.set_xscale("log")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.15)
    axes.set_xlabel("time to the first token, seconds (logarithmic)")
    axes.set_title(f"A prompt of {report.rows[0]['prompt_tokens']:,} tokens, SmolLM2 float32", loc="left")
    return figure


if __name__ == "__main__":
    main()
