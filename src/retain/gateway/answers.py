"""Answers: the bodies of OpenAI's API, whole and in chunks, with what Retain adds to them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from retain.gateway.explain import Miss
from retain.gateway.generation import Chosen, Ending, Piece
from retain.gateway.stops import ToolCall

Json = dict[str, Any]


@dataclass(frozen=True)
class Account:
    """What a request cost: where its prompt's tokens came from, how long it took, why it missed."""

    prompt_tokens: int
    ending: Ending
    queued_seconds: float
    ttft_seconds: float | None
    miss: Miss | None
    ignored: tuple[str, ...] = ()
    transfer: Json | None = None
    """`kv_transfer_params` for the server that goes on from this prompt, where one was announced."""

    @property
    def usage(self) -> Json:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.ending.generated,
            "total_tokens": self.prompt_tokens + self.ending.generated,
            "prompt_tokens_details": {
                "cached_tokens": self.ending.report.reused,
                # Blocks that were written may reach into the answer; OpenAI's field is about the prompt.
                "cache_write_tokens": min(self.ending.report.written, self.prompt_tokens),
            },
        }

    @property
    def retain(self) -> Json:
        """The field `retain`: see docs/server.md."""
        report = self.ending.report
        told: Json = {
            "tokens": {
                "memory": report.tokens_by_tier.get("memory", 0),
                "disk": report.tokens_by_tier.get("disk", 0),
                **{
                    tier: tokens
                    for tier, tokens in report.tokens_by_tier.items()
                    if tier not in ("memory", "disk")
                },
                "computed": report.computed,
            },
            "ttft_seconds": _rounded(self.ttft_seconds),
            "queued_seconds": _rounded(self.queued_seconds),
            "load_seconds": _rounded(report.load_seconds),
            "saved_seconds": _rounded(report.saved_seconds),
            "fidelity": report.fidelity,
            "classes": dict(report.classes),
            "written_tokens": report.written,
            "lost_tokens": report.lost,
            "miss": None if self.miss is None else asdict(self.miss),
        }
        if self.ignored:
            told["ignored_fields"] = list(self.ignored)
        return told


@dataclass(frozen=True)
class Form:
    """The frame that every body of one answer shares. `chat` chooses between the two APIs' forms."""

    chat: bool
    model: str
    fingerprint: str
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}")

    def whole(self, piece: Piece, account: Account) -> Json:
        """The answer in one body."""
        choice: Json = {"index": 0}
        if self.chat:
            message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.calls:
                message["content"] = piece.text.strip() or None
                message["tool_calls"] = [
                    _call(call, number, self.id) for number, call in enumerate(piece.calls)
                ]
            choice["message"] = message
            choice["logprobs"] = _chat_logprobs(piece.chosen)
        else:
            choice["text"] = piece.text
            choice["logprobs"] = _text_logprobs(piece.chosen)
        choice["finish_reason"] = account.ending.reason
        kind = "chat.completion" if self.chat else "text_completion"
        told = {**self._frame(kind), "choices": [choice], "usage": account.usage, "retain": account.retain}
        if account.transfer is not None:
            told["kv_transfer_params"] = account.transfer
        return told

    def opening(self) -> Json:
        """The first chunk of a chat: the role."""
        return self._chunk(self._delta({"role": "assistant", "content": ""}))

    def chunk(self, piece: Piece, calls_before: int) -> Json:
        """A part of the answer; `calls_before` tool calls were sent already."""
        if not self.chat:
            return self._chunk(
                {
                    "index": 0,
                    "text": piece.text,
                    "logprobs": _text_logprobs(piece.chosen),
                    "finish_reason": None,
                }
            )
        delta: Json = {"content": piece.text} if piece.text or not piece.calls else {}
        if piece.calls:
            delta["tool_calls"] = [
                {"index": number, **_call(call, number, self.id)}
                for number, call in enumerate(piece.calls, calls_before)
            ]
        return self._chunk(self._delta(delta, piece.chosen))

    def ending(self, account: Account) -> list[Json]:
        """The last chunks: the reason, and the usage where asked for; `retain` is in the last one."""
        last = self._delta({}) if self.chat else {"index": 0, "text": "", "logprobs": None}
        chunks = [self._chunk({**last, "finish_reason": account.ending.reason})]
        if self.include_usage:
            chunks.append({**self._frame(self._chunk_kind), "choices": [], "usage": account.usage})
        chunks[-1]["retain"] = account.retain
        return chunks

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._frame(self._chunk_kind), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _delta(self, delta: Json, chosen: Sequence[Chosen] = ()) -> Json:
        return {"index": 0, "delta": delta, "logprobs": _chat_logprobs(chosen), "finish_reason": None}

    def _frame(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def _call(call: ToolCall, number: int, answer: str) -> Json:
    return {
        "id": f"call_{answer.rpartition('-')[2][:20]}_{number}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _chat_logprobs(chosen: Sequence[Chosen]) -> Json | None:
    if not chosen:
        return None
    content = []
    for each in chosen:
        shown = {"token": each.token.text, "logprob": each.token.logprob, "bytes": each.token.data}
        top = [{"token": other.text, "logprob": other.logprob, "bytes": other.data} for other in each.top]
        content.append({**shown, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _text_logprobs(chosen: Sequence[Chosen]) -> Json | None:
    if not chosen:
        return None
    return {
        "tokens": [each.token.text for each in chosen],
        "token_logprobs": [each.token.logprob for each in chosen],
        "top_logprobs": [{other.text: other.logprob for other in each.top} for each in chosen],
        "text_offset": [each.offset for each in chosen],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
