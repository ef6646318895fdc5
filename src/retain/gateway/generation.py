"""One request's way through the engine: steps to text, stop strings, tool calls, and what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from retain.gateway.engine import Engine, Report, Sampling, Step
from retain.gateway.stops import StopStrings, ToolCall, ToolCalls
from retain.gateway.tokenizer import Decoding, Prompt, Tokenizer


@dataclass(frozen=True)
class Alternative:
    """A token with its log probability, as an answer shows it."""

    text: str
    logprob: float
    data: list[int] | None


@dataclass(frozen=True)
class Chosen:
    """A generated token's log probability, the likeliest in its place, and where its text begins."""

    token: Alternative
    top: tuple[Alternative, ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """A part of the answer that is final: text, calls of tools, and its tokens' log probabilities."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    chosen: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class Ending:
    """The end of an answer: why, tokens generated, what the engine reports, and seconds since it began."""

    reason: str
    generated: int
    report: Report
    first_token_seconds: float | None
    seconds: float


@dataclass(frozen=True)
class Wish:
    """What a generation is to do: sampling, the strings that end it, and what of it is to be shown."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    tools: bool = False


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Prompt,
    wish: Wish,
    *,
    tenant: str | None,
    cache_salt: str | None,
    fidelity: str | None,
    cancelled: Callable[[], bool],
    progress: Callable[[float], None],
) -> Iterator[Piece | Ending]:
    """The pieces of the answer as they become final, then its ending. Runs where it is iterated."""
    began = time.monotonic()
    first: float | None = None
    answer = _Answer(tokenizer, wish)
    reason = "length"
    generated = 0
    run = engine.run(
        prompt.tokens.tolist(),
        wish.sampling,
        tenant=tenant,
        cache_salt=cache_salt,
        fidelity=fidelity,
        cancelled=cancelled,
        progress=progress,
    )
    try:
        for step in run:
            if first is None:
                first = time.monotonic() - began
            generated += 1
            if step.finish == "stop":
                reason = "stop"
                break
            piece = answer.push(step)
            if piece is not None:
                yield piece
            if answer.stopped:
                reason = "stop"
                break
            if cancelled():
                reason = "cancelled"
                break
        else:
            if cancelled():
                reason = "cancelled"
    finally:
        run.close()
    piece = answer.end()
    if piece is not None:
        yield piece
    if answer.called and reason == "stop":
        reason = "tool_calls"
    yield Ending(reason, generated, run.report, first, time.monotonic() - began)


@dataclass
class _Answer:
    """The answer as it grows."""

    tokenizer: Tokenizer
    wish: Wish
    called: bool = False
    _chosen: list[Chosen] = field(default_factory=list)
    _decoded: int = 0
    _shown: int = 0

    def __post_init__(self) -> None:
        self._decoding = Decoding(self.tokenizer)
        self._stops = StopStrings(self.wish.stop)
        self._calls = ToolCalls() if self.wish.tools else None

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, step: Step) -> Piece | None:
        if self.wish.sampling.top_logprobs is not None:
            self._chosen.append(self._choice(step))
        text = self._decoding.push(step.token)
        self._decoded += len(text)
        return self._piece(self._stops.push(text), last=False)

    def end(self) -> Piece | None:
        text = self._stops.push(self._decoding.end())
        if not self.stopped:
            text += self._stops.end()
        return self._piece(text, last=True)

    def _piece(self, text: str, *, last: bool) -> Piece | None:
        self._shown += len(text)
        calls: list[ToolCall] = []
        if self._calls is not None:
            text, calls = self._calls.push(text)
            if last:
                more, late = self._calls.end()
                text, calls = text + more, calls + late
            self.called = self.called or bool(calls)
        chosen: list[Chosen] = []
        # A token goes with the text that it begins in; behind a stop string nothing is shown of any.
        everything = last and not self.stopped
        while self._chosen and (everything or self._chosen[0].offset < self._shown):
            chosen.append(self._chosen.pop(0))
        if not text and not calls and not chosen:
            return None
        return Piece(text, tuple(calls), tuple(chosen))

    def _choice(self, step: Step) -> Chosen:
        wanted = self.wish.sampling.top_logprobs or 0
        return Chosen(
            self._alternative(step.token, step.logprob),
            tuple(self._alternative(token, logprob) for token, logprob in step.top[:wanted]),
            self._decoded,
        )

    def _alternative(self, token: int, logprob: float | None) -> Alternative:
        text, data = self.tokenizer.piece(token)
        # JSON has no infinities; OpenAI's API says -9999.0 for what is too unlikely to be told.
        return Alternative(text, logprob if logprob is not None and math.isfinite(logprob) else -9999.0, data)


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        tuple(chosen for piece in pieces for chosen in piece.chosen),
    )
