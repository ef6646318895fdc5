"""A client's request as the relay reads it: how long its prompt is, and what each server is sent of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from retain.gateway.refusal import Refusal

BYTES_A_TOKEN = 4
"""What a token of English or of code takes, roughly. A prompt is only weighed with this, never cut."""

Headers = Sequence[tuple[bytes, bytes]]
Raw = dict[str, msgspec.Raw]

_ANSWER_FIELDS = (
    "best_of", "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "n", "response_format",
    "stream", "stream_options", "structured_outputs", "top_logprobs", "use_beam_search",
)  # fmt: skip
"""Fields that shape an answer and not the prompt: the prefill server is not asked for them."""

_OF_ANOTHER_HOP = {
    b"accept-encoding", b"connection", b"content-length", b"expect", b"host", b"keep-alive",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: its path, its body as it came, and the headers that go on to every server."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    fields: Raw = field(default_factory=dict, repr=False)

    @property
    def prompt_tokens(self) -> int:
        """About how many tokens its prompt has; pictures and the like count as many."""
        if "messages" in self.fields:
            size = len(self.fields.get("tools", b""))
            return size // BYTES_A_TOKEN + sum(_weigh(each) for each in _list(_read(self.fields["messages"])))
        return _weigh(_read(self.fields.get("prompt")))

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the answer tells of every token of the prompt, so that no server can skip its work."""
        echoes = _read(self.fields.get("echo")) and _read(self.fields.get("logprobs")) is not None
        return bool(echoes) or _read(self.fields.get("prompt_logprobs")) is not None

    @property
    def transfer(self) -> dict[str, Any]:
        """The client's own `kv_transfer_params`."""
        given = _read(self.fields.get("kv_transfer_params"))
        return given if isinstance(given, dict) else {}

    def for_prefill(self) -> bytes:
        """The body for the prefill server: the same prompt, one token, all at once."""
        asked: dict[str, Any] = {name: raw for name, raw in self.fields.items() if name not in _ANSWER_FIELDS}
        asked["max_tokens"] = 1
        asked["kv_transfer_params"] = {**self.transfer, "do_remote_decode": True, "do_remote_prefill": False}
        return msgspec.json.encode(asked)

    def for_decode(self, handed: dict[str, Any] | None) -> bytes:
        """The body for the decode server: as it came, with what the prefill server handed over, if it did."""
        if not handed:
            return self.body
        return msgspec.json.encode({**self.fields, "kv_transfer_params": {**self.transfer, **handed}})


def read_ask(path: str, headers: Headers, body: bytes) -> Ask:
    """Read a request with a body. Raises Refusal where that is no JSON object."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"The body is not a JSON object: {error}") from error
    return Ask("POST", path, passed_on(headers), body, fields)


def passed_on(headers: Headers) -> Headers:
    """The headers that concern more than one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ANOTHER_HOP]


MUCH = 1 << 20
"""The weight of what cannot be counted here."""


def _weigh(prompt: Any) -> int:
    """About how many tokens a prompt, a part of one, or a message has."""
    if isinstance(prompt, str):
        return len(prompt.encode("utf-8", "surrogatepass")) // BYTES_A_TOKEN
    if isinstance(prompt, list):
        return sum(1 if isinstance(each, int) else _weigh(each) for each in prompt)
    if not isinstance(prompt, dict):
        return 0
    if prompt.get("type", "text") != "text":
        return MUCH
    text = prompt.get("text") if "text" in prompt else prompt.get("content")
    return _weigh(text) + len(msgspec.json.encode(prompt.get("tool_calls"))) // BYTES_A_TOKEN


def _read(raw: msgspec.Raw | None) -> Any:
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # it is the decode server's to say what is wrong with it


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
