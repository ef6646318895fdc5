"""Scoring: what an engine says of each of a text's tokens, in a process of its own.

`python -m retain.engines.scoring JOB` reads a job, JSON, and writes what it found beside it: for handshakes
and benches. Every engine goes the way that its users' requests go: through its adapter, a cache over the
job's tiers, and the handshakes on record.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import retain
from retain.cache import BlockCache
from retain.handshake import Party
from retain.header import layers_from_text, layers_text
from retain.model import ModelSpec

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Text:
    """A prompt, and the tokens that are forced to follow it."""

    prompt: list[int]
    forced: list[int]


@dataclass(frozen=True)
class Job:
    """What to score: `texts` with `model` in `engine`, over `tiers` of a cache; none: without a cache.

    `batch` computes a prompt in pieces of so many tokens, as another way of computing the same. `options` are
    the engine's own: dtype, flash, threads.
    """

    engine: str
    model: str
    texts: list[Text]
    tiers: list[str] = field(default_factory=list)
    batch: int | None = None
    fidelity: str = "kin-quantised"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Score:
    """One text's outcome: logits `[forced, vocabulary]`, of which row i is of the i-th forced token; how much
    of the prompt came from the cache, by class; seconds until the first of them, and of reading and
    writing."""

    logits: Logits
    classes: dict[str, int]
    first_seconds: float
    load_seconds: float


@dataclass(frozen=True, eq=False)
class Scored:
    """What a job found."""

    party: Party
    spec: ModelSpec
    scores: tuple[Score, ...]


class Scorer(Protocol):
    """An engine as jobs need it."""

    @property
    def party(self) -> Party: ...

    @property
    def spec(self) -> ModelSpec: ...

    def score(self, text: Text) -> Score:
        """Score a text, and wait until what was computed is kept."""


def run(job: Job) -> Scored:
    """Run a job in this process. Raises the RetainErrors of its engine."""
    with opened(job) as scorer:
        return Scored(scorer.party, scorer.spec, tuple(scorer.score(text) for text in job.texts))


@contextmanager
def opened(job: Job) -> Iterator[Scorer]:
    """The engine of a job, ready to score."""
    if job.engine == "vllm":
        from retain.engines.vllm.scoring import opened as open_vllm

        with open_vllm(job.model, job.tiers, job.batch, job.fidelity, job.options) as scorer:
            yield scorer
        return
    with retain.open(*(job.tiers or ["memory:0"]), policy="reuse-leaf") as cache:
        cache.planner.best_prefix = _everything  # type: ignore[method-assign]
        open_one = {"transformers": _transformers, "llamacpp": _llamacpp}[job.engine]
        with open_one(job, cache) as found:
            yield found
        cache.flush()


@contextmanager
def _transformers(job: Job, cache: BlockCache) -> Iterator[Scorer]:
    import torch

    from retain.engines import transformers
    from retain.engines.transformers.capture import PRODUCER
    from retain.engines.transformers.identity import numeric_class
    from retain.engines.transformers.loading import load

    if "threads" in job.options:
        torch.set_num_threads(int(job.options["threads"]))
    loaded = load(job.model, job.options.get("dtype", "float32"))
    with transformers.attach(loaded.model, None, cache, spec=loaded.spec, fidelity=job.fidelity) as engine:

        def score(tokens: list[int], keep: int) -> tuple[Logits, Any]:
            if job.batch is not None:
                return transformers.Alone(loaded.model).score(tokens, keep, job.batch), None
            found = engine.forward(torch.tensor([tokens]), logits_to_keep=keep)
            return found.logits[0, -keep:].float().numpy(), found.report

        party = Party(
            "transformers", PRODUCER, engine.spec.variant, engine.spec.dtype, numeric_class(loaded.model)
        )
        yield _InProcess(party, engine.spec, score, engine.settle)


@contextmanager
def _llamacpp(job: Job, cache: BlockCache) -> Iterator[Scorer]:
    from retain.engines import llamacpp
    from retain.engines.llamacpp.capture import PRODUCER
    from retain.engines.llamacpp.identity import numeric_class

    names = ("dtype", "flash", "threads", "context")
    chosen = {name: job.options[name] for name in names if name in job.options}
    if job.batch is not None:
        chosen["batch"] = job.batch
    with llamacpp.attach(job.model, cache, llamacpp.Settings(**chosen), fidelity=job.fidelity) as engine:

        def score(tokens: list[int], keep: int) -> tuple[Logits, Any]:
            found = engine.forward(tokens, logits_to_keep=keep)
            return found.logits, found.report

        spec = engine.spec
        party = Party("llamacpp", PRODUCER, spec.variant, spec.dtype, numeric_class(engine.host.gguf))
        yield _InProcess(party, spec, score, engine.settle)


@dataclass(frozen=True)
class _InProcess:
    party: Party
    spec: ModelSpec
    compute: Callable[[list[int], int], tuple[Logits, Any]]
    settle: Callable[[], bool]

    def score(self, text: Text) -> Score:
        # The last forced token is only looked at, not run.
        began = time.perf_counter()
        logits, report = self.compute([*text.prompt, *text.forced[:-1]], len(text.forced))
        seconds = time.perf_counter() - began
        self.settle()
        if report is None:
            return Score(logits, {}, seconds, 0.0)
        return Score(logits, dict(report.classes), report.ttft, report.lookup_seconds + report.load_seconds)


def main() -> None:
    """Run the job in a file; write `JOB.npz` with the logits and, last, `JOB.out` with the rest."""
    path = Path(sys.argv[1])
    given = json.loads(path.read_bytes())
    scored = run(Job(**{**given, "texts": [Text(**text) for text in given["texts"]]}))
    np.savez(path.with_suffix(".npz"), *[score.logits for score in scored.scores])
    told = {
        "party": {**asdict(scored.party), "variant": scored.party.variant.hex()},
        "spec": _told_spec(scored.spec),
        "scores": [
            {"classes": s.classes, "first_seconds": s.first_seconds, "load_seconds": s.load_seconds}
            for s in scored.scores
        ],
    }
    path.with_suffix(".out").write_text(json.dumps(told))


def read_scored(path: Path) -> Scored:
    """What `main` wrote for the job in `path`. Raises OSError, ValueError or KeyError where it did not."""
    told: Mapping[str, Any] = json.loads(path.with_suffix(".out").read_bytes())
    with np.load(path.with_suffix(".npz")) as arrays:
        logits = [arrays[f"arr_{number}"] for number in range(len(told["scores"]))]
    party = Party(**{**told["party"], "variant": bytes.fromhex(told["party"]["variant"])})
    scores = tuple(Score(each, **rest) for each, rest in zip(logits, told["scores"], strict=True))
    return Scored(party, _spec(told["spec"]), scores)


def _told_spec(spec: ModelSpec) -> dict[str, str]:
    return {
        "name": spec.name,
        "architecture": spec.architecture,
        "layers": layers_text(spec.layers),
        "dtype": spec.dtype,
        "kin": spec.kin.hex(),
        "variant": spec.variant.hex(),
    }


def _spec(told: Mapping[str, str]) -> ModelSpec:
    return ModelSpec(
        told["name"],
        told["architecture"],
        layers_from_text(told["layers"]),
        told["dtype"],
        bytes.fromhex(told["kin"]),
        bytes.fromhex(told["variant"]),
    )


def _everything(spec: Any, blocks: Sequence[Any], total: int) -> int:
    """Load whatever is kept, however little computing would cost."""
    return len(blocks)


if __name__ == "__main__":
    main()
