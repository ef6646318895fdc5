"""A server behind the relay: asked over connections that are kept, and left alone while it is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx

from retain.errors import StoreUnavailable
from retain.relay.ask import Ask
from retain.stores.http_link import HttpLink, Place
from retain.stores.remote import Remote, describe

CONNECT_SECONDS = 5.0
KEPT_SECONDS = 4.0
"""How long an unused connection is kept: less than the 5 s after which uvicorn, and so vLLM, closes it."""

MOST_CALLS = 1 << 20
"""The relay has a bound of its own on requests; none waits here."""

BUSY = (429, 503)
"""A server that says so is well and has no room, or is not ready: another may have."""


class ServerFailed(StoreUnavailable):
    """A server did not answer. `reason` is a word for counters: refused, broken, timeout, status, down."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

    @property
    def status(self) -> int:
        return 504 if self.reason == "timeout" else 502


class Upstream:
    """One server in its role, `prefill` or `decode`. All calls come from one event loop."""

    def __init__(self, url: str, role: str, client: httpx.AsyncClient) -> None:
        self._place = Place.parse(url)
        self.role = role
        self.name = self._place.shown
        self.running = 0
        self._base = url.rstrip("/").removesuffix("/v1")
        self._client = client
        self.remote = Remote(f"the {role} server {self.name}", self._ping, calls=MOST_CALLS)

    @asynccontextmanager
    async def ask(
        self, ask: Ask, body: bytes, silence: float, within: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; the answer's head is there, its body is yet to be read.

        `silence`: the seconds for which the server may say nothing. `within`: seconds for all that happens
        inside. Raises ServerFailed, and counts it against the server, also for what goes wrong inside.
        """
        self.running += 1
        try:
            with self._up().call(patient=True):
                try:
                    async with asyncio.timeout(within), self._stream(ask, body, silence) as response:
                        if response.status_code >= 500 and response.status_code not in BUSY:
                            raise self._failed("status", f"answered {response.status_code}")
                        yield response
                except (httpx.TimeoutException, TimeoutError) as error:
                    reason = "refused" if isinstance(error, httpx.ConnectTimeout) else "timeout"
                    raise self._failed(reason, "gave no answer in time") from error
                except httpx.TransportError as error:
                    reason = "refused" if isinstance(error, httpx.ConnectError) else "broken"
                    raise self._failed(reason, describe(error)) from error
        finally:
            self.running -= 1

    def _up(self) -> Remote:
        if not self.remote.up:
            raise self._failed("down", self.remote.health().reason)
        return self.remote

    def _failed(self, reason: str, text: str) -> ServerFailed:
        return ServerFailed(
            reason, text if text.startswith(self.remote.what) else f"{self.remote.what}: {text}"
        )

    def _stream(self, ask: Ask, body: bytes, silence: float) -> AbstractAsyncContextManager[httpx.Response]:
        # What comes back is passed on as it is, so it must not be packed in a way the client did not ask for.
        headers = [*ask.headers, (b"accept-encoding", b"identity")]
        timeout = httpx.Timeout(silence, connect=min(silence, CONNECT_SECONDS), pool=None)
        return self._client.stream(
            ask.method, self._base + ask.path, headers=headers, content=body or None, timeout=timeout
        )

    def _ping(self, seconds: float) -> float:
        """Ask for the server's health, from a thread of its own."""
        began = time.monotonic()
        until = began + seconds
        link = HttpLink.connect(self._place, until)
        try:
            link.send("GET", self._place.path.removesuffix("/v1") + "/health", until)
            answer = link.answer(until)
        finally:
            link.close()
        if answer.status != 200:
            raise StoreUnavailable(f"{self.remote.what} is not ready: its /health answers {answer.status}")
        return time.monotonic() - began
