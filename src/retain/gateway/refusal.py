"""Refusals: requests that are not served, in the shape in which OpenAI's API says so."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
}


class Refusal(Exception):
    """A request that is not served: HTTP status, a sentence, and the field and code that clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def unavailable(message: str, retry_after: int) -> Refusal:
    """A 503 that says when to come back, in seconds."""
    return Refusal(503, message, code="unavailable", headers={"Retry-After": str(retry_after)})


def too_long(prompt: int, wanted: int | None, context: int, *, at_least: bool = False) -> Refusal:
    """The refusal of a prompt that, with the tokens asked for, does not fit the model's context."""
    has = "has at least" if at_least else "has"
    answer = "" if wanted is None else f" and {wanted} for the answer make {prompt + wanted}"
    return Refusal(
        400,
        f"This model's maximum context length is {context} tokens. The prompt {has} {prompt} tokens{answer}, "
        f"which is too many: shorten the prompt or ask for a shorter answer.",
        param="messages" if wanted is None else "max_tokens",
        code="context_length_exceeded",
    )
