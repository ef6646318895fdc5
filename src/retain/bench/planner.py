"""Bench `planner`: load or recompute, over links from good to hopeless, beside always loading and never.

A kept prompt lies in Redis, behind a proxy that adds delay and bounds the bandwidth. For each link a fresh
cache meets the tier three times, unmeasured; then it takes turns with one that always loads, and with one
that has nothing to load. Memory is emptied before every request.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from retain.bench.progress import Steps
from retain.bench.proxy import Way
from retain.bench.report import Report, Value, new_figure
from retain.bench.services import redis_server
from retain.bench.texts import long_prompt
from retain.bench.ttft import MODEL, Run, ask
from retain.cache import Cache, open_cache
from retain.engines.transformers import Engine, attach
from retain.engines.transformers.loading import Loaded, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DELAYS = (0.0, 0.02, 0.2)
"""Seconds that the proxy adds to what comes back."""

RATES = (1e6, 20e6, 60e6, None)
"""Bytes a second that the proxy lets through; None is all there are."""

TOKENS = 512
MEETINGS = 3
ROUNDS = 5
ENOUGH = 4.0
"""Loading is given up after so many times as long as computing takes: it has lost by then."""

MEMORY = "memory:512MiB"


def run(
    delays: Sequence[float] = DELAYS,
    rates: Sequence[float | None] = RATES,
    tokens: int = TOKENS,
    rounds: int = ROUNDS,
) -> Report:
    """Measure with SmolLM2 in float32. Raises MissingDependency without a redis-server."""
    links = [(delay, rate) for delay in delays for rate in rates]
    with (
        Steps("planner", len(links) + 1) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
        redis_server(Path(folder) / "redis") as server,
        Way(server.port) as way,
    ):
        steps.step("loading the model", 0)
        bench = _Bench(load(MODEL), tokens, rounds, way, server.port)
        steps.step("the first prompt")
        rows = []
        for delay, rate in links:
            rows.append(bench.link(delay, rate))
            steps.step(f"{delay * 1e3:.0f} ms, {'unlimited' if rate is None else f'{rate / 1e6:g} MB/s'}")
    worst = max(float(row["planned_over_best"] or 0) for row in rows)
    return Report("planner", rows, {"planner.worst_over_best": worst}, {"text_equal": bench.equal})


class _Bench:
    def __init__(self, loaded: Loaded, tokens: int, rounds: int, way: Way, server: int) -> None:
        self._loaded = loaded
        text = long_prompt(loaded.tokenizer.encode, 2 * tokens)
        self._prompt, self._other = text[:tokens], text[tokens:]
        self._others = 0
        self._rounds = rounds
        self._way = way
        self.equal = True
        with self._engine(f"redis://127.0.0.1:{server}") as (cache, engine):
            self._compute_another(cache, engine)  # the libraries do once what they do once
            self._computed = self._take(cache, engine, self._prompt)
            cache.flush()
        self._expected = self._computed.answer

    def link(self, delay: float, rate: float | None) -> dict[str, Value]:
        """Planned, loaded and computed over one link."""
        remote = f"redis://127.0.0.1:{self._way.port}"
        with ExitStack() as opened:
            planned = opened.enter_context(self._engine(remote))
            loading = opened.enter_context(self._engine(remote))
            computing = opened.enter_context(self._engine())
            self._way.set(0.0, None)
            self._compute_another(*planned)  # how long a prefill takes
            self._way.set(delay, rate)
            for _ in range(MEETINGS):
                self._take(*planned, self._prompt)
            taken: dict[str, list[float]] = {"planned": [], "load": [], "compute": []}
            reused = []
            for turn in range(self._rounds):
                contenders = [("planned", planned), ("load", loading), ("compute", computing)]
                for name, (cache, engine) in contenders[turn % 3 :] + contenders[: turn % 3]:
                    if name == "load":
                        if len(taken["load"]) and taken["load"][0] > ENOUGH * min(taken["compute"] or [1e9]):
                            continue  # once was enough
                        _always_load(cache, ENOUGH * self._computed.first.seconds)
                    found = self._take(cache, engine, self._prompt)
                    taken[name].append(found.first.seconds)
                    if name == "planned":
                        reused.append(sum(found.reused.values()))
            probes = planned[0].stats().counters["probes"]
        middle = {name: median(seconds) for name, seconds in taken.items()}
        best = min(middle["load"], middle["compute"])
        return {
            "delay_seconds": delay,
            "rate_bytes": rate,
            "prompt_tokens": len(self._prompt),
            "planned_seconds": middle["planned"],
            "load_seconds": middle["load"],
            "compute_seconds": middle["compute"],
            "planned_reused_tokens": median(reused),
            "probes": probes,
            "planned_over_best": middle["planned"] / best,
        }

    def _compute_another(self, cache: Cache, engine: Engine) -> None:
        """A prompt that nobody has asked before, written wherever it goes."""
        self._others += 1
        ask(engine, [self._others, *self._other[1:]], 1)
        engine.settle()
        cache.flush()

    def _take(self, cache: Cache, engine: Engine, prompt: Sequence[int]) -> Run:
        """One request, to its first token, that finds nothing in memory; everything has settled after it."""
        cache.clear(tier="memory")
        found = ask(engine, prompt, 1)
        engine.settle()
        if prompt is self._prompt and hasattr(self, "_expected"):
            self.equal = self.equal and found.answer == self._expected
        return found

    @contextmanager
    def _engine(self, *tiers: str) -> Iterator[tuple[Cache, Engine]]:
        with (
            open_cache(MEMORY, *tiers) as cache,
            attach(self._loaded.model, self._loaded.tokenizer, cache, spec=self._loaded.spec) as engine,
        ):
            yield cache, engine


def _always_load(cache: Cache, seconds: float) -> None:
    """Have a cache load whatever it finds, for so long at the most."""
    planner: Any = cache.planner
    planner.best_prefix = lambda spec, blocks, total: len(blocks)
    planner.patience = lambda spec, first, tokens: seconds


def plot(report: Report) -> Figure:
    """Times to the first token by link: planned beside always loading and never."""
    figure, axes = new_figure(9.0, 3.8)
    labels = [
        f"{float(row['delay_seconds'] or 0) * 1e3:.0f} ms\n"
        + ("no limit" if row["rate_bytes"] is None else f"{float(row['rate_bytes']) / 1e6:g} MB/s")
        for row in report.rows
    ]
    for key, label, style in (
        ("load_seconds", "always load", "s--"),
        ("compute_seconds", "never load", "^--"),
        ("planned_seconds", "as planned", "o-"),
    ):
        axes.plot(labels, [float(row[key] or 0) for row in report.rows], style, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("time to the first token, seconds (logarithmic)")
    axes.set_title("Load or recompute, by link", loc="left")
    axes.legend(frameon=False)
    return figure
