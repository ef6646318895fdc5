"""What the server needs of an engine: token ids go in, token ids come out, and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retain.identity import Chain, Tokens
from retain.model import ModelSpec


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the likeliest; `top_logprobs` None gives no logprobs."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Step:
    """One generated token, its log probability, and the likeliest tokens in its place, best first.

    `finish` is set on the last: "length", or "stop" where the token is the model's end of text and no part of
    the answer.
    """

    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Report:
    """What a run read, computed and kept: the prompt's tokens by tier and computed, tokens newly written.

    `classes` are the tokens that were read, by class: exact, or kin of another variant. `found` is what the
    cache had before the planner shortened it; `saved_seconds` what reading took less than computing would
    have, where that can be told. `fidelity` is what the answer's KV inherits from what was read (see
    retain.fidelity). `lost` counts kept tokens of an earlier answer that this prompt renders differently.
    """

    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    found: int = 0
    computed: int = 0
    written: int = 0
    load_seconds: float = 0.0
    saved_seconds: float | None = None
    fidelity: str = "exact"
    lost: int = 0

    @property
    def reused(self) -> int:
        return sum(self.tokens_by_tier.values())


class Run(Protocol):
    """One generation: iterate for its steps. `report` is complete at the end."""

    def __iter__(self) -> Iterator[Step]: ...

    @property
    def report(self) -> Report: ...

    def close(self) -> None:
        """End the generation now; what was computed so far may still be kept. Idempotent."""


class Engine(Protocol):
    """A loaded model. `run` is called by one thread at a time."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer may have together."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, with the methods of Hugging Face's (see retain.gateway.tokenizer)."""

    def run(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        tenant: str | None,
        cache_salt: str | None,
        fidelity: str | None,
        cancelled: Callable[[], bool],
        progress: Callable[[float], None],
    ) -> Run:
        """Start a generation in the space of the tenant and salt, on kept KV of `fidelity` at the lowest;
        None takes what the engine was opened with.

        `cancelled` is asked often, and `progress` told the share of the prefill that is done.
        """

    def chain(self, tokens: Sequence[int] | Tokens, tenant: str | None, cache_salt: str | None) -> Chain:
        """The keys under which a run with this tenant and salt reads and writes."""

    def settle(self) -> None:
        """Wait until what earlier runs computed has been handed to the cache."""

    def close(self) -> None:
        """Settle, and let the model go."""
