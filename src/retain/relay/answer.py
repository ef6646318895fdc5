"""The answer on its way to the client: event streams byte for byte as they come, other bodies whole."""

from __future__ import annotations

import httpx
from starlette.types import Send

from retain.gateway.refusal import Refusal
from retain.gateway.wire import event
from retain.relay.upstream import ServerFailed

MAX_ANSWER_BYTES = 64 << 20
"""Far more than any answer that is not streamed: log probabilities of thousands of tokens take megabytes."""

_OF_ANOTHER_HOP = {
    b"connection",
    b"content-length",
    b"keep-alive",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}


class Answer:
    """What a client is sent. `begun`: its head is out, so that no other server can be asked any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.status = 0

    async def take(self, response: httpx.Response) -> None:
        """Pass on a server's answer. It begins with the first bytes of the body, not with a head that is soon
        sent. Raises ServerFailed, and what reading raises.
        """
        headers = [each for each in response.headers.raw if each[0].lower() not in _OF_ANOTHER_HOP]
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            body = await read_whole(response)
            headers.append((b"content-length", str(len(body)).encode()))
            await self._begin(response.status_code, headers)
            await self._body(body, more=False)
            return
        held = b""
        async for data in response.aiter_raw():
            if not self.begun:
                await self._begin(response.status_code, headers)
            # A line is passed on when it is complete: should the server die in the middle of one, the error
            # that follows must not be taken for its end.
            whole = data.rfind(b"\n") + 1
            if whole:
                await self._body(held + data[:whole])
                held = data[whole:]
            else:
                held += data
        if not self.begun:
            await self._begin(response.status_code, headers)
        await self._body(held, more=False)

    async def end_with(self, refusal: Refusal) -> None:
        """End an event stream that has begun with an error, as OpenAI's clients expect it."""
        await self._body(b"\n" + event(refusal.body), more=False)

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def read_whole(response: httpx.Response) -> bytes:
    """The whole body of an answer. Raises ServerFailed where it is larger than any should be."""
    body = bytearray()
    async for data in response.aiter_raw():
        body += data
        if len(body) > MAX_ANSWER_BYTES:
            raise ServerFailed("large", f"{response.url} answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
