"""HTTP as the server speaks it: bodies of bounded size, event streams, and clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retain.gateway.refusal import Refusal

MAX_BODY_BYTES = 16 << 20
"""More than the longest context of today's models holds as text, and little enough to be read in memory."""

KEEP_ALIVE_SECONDS = 15.0
"""A comment is sent after this long without an event, lest a long prefill be taken for a dead line."""

KEEP_ALIVE = b": still working\n\n"
DONE = b"data: [DONE]\n\n"


class JsonResponse(Response):
    """A body of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises Refusal when it is too large or not said to be JSON.

    A web page can make a browser send plain text to this server without asking, but not JSON: so only JSON is
    read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"the body must be sent as Content-Type: application/json, got {kind or 'none'!r}")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise Refusal(499, "the client hung up") from error
    return bytes(body)


def _too_large() -> Refusal:
    return Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="request_too_large")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(
    work: Coroutine[Any, Any, Any], gone: asyncio.Future[None], timeout: float | None = None
) -> Any:
    """The result of `work`. Raises Gone when the client hangs up first, TimeoutError after `timeout`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Gone
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()


class Gone(Exception):
    """The client hung up."""


class EventStream(Response):
    """Server-sent events as they come. `leave` is called at the end, and at once when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        queue: asyncio.Queue[Any],
        render: Callable[[Any], tuple[bytes, bool]],
        leave: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._queue = queue
        self._render = render
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events(gone):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._leave()

    async def _events(self, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
        more = True
        while more:
            try:
                got = await until_gone(self._queue.get(), gone, KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            except Gone:
                return
            data, more = self._render(got)
            if data:
                yield data
