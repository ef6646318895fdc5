"""The relay's HTTP application: OpenAI's paths, passed on, and its own for health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send

from retain.gateway.app import no_such_path
from retain.gateway.metrics import CONTENT_TYPE
from retain.gateway.refusal import Refusal, unavailable
from retain.gateway.wire import JsonResponse, hung_up, read_body
from retain.relay.answer import Answer
from retain.relay.ask import Ask, passed_on, read_ask
from retain.relay.relay import Relay

log = logging.getLogger("retain.relay")


def application(relay: Relay, lifespan: Lifespan[Starlette]) -> Starlette:
    """The application in front of a relay."""

    async def generate(request: Request) -> Response:
        return _Relayed(relay, request)

    async def health(request: Request) -> Response:
        servers = [
            {
                "role": each.role,
                "url": each.name,
                "state": each.remote.health().state,
                "reason": each.remote.health().reason,
                "running": each.running,
            }
            for each in relay.servers
        ]
        serves = any(each.remote.up for each in relay.decoders)
        whole = all(each.remote.up for each in relay.servers)
        status = "ok" if whole else "degraded" if serves else "failed"
        return JsonResponse(
            {"status": status, "running": relay.running, "servers": servers}, 200 if serves else 503
        )

    async def metrics(request: Request) -> Response:
        return Response(relay.meter.text(), headers={"Content-Type": CONTENT_TYPE})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", generate, methods=["POST"]),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/models", generate, methods=["GET"]),
            Route("/v1/models/{model:path}", generate, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        exception_handlers={HTTPException: no_such_path},
        lifespan=lifespan,
    )


class _Relayed(Response):
    """One request from here on: read, passed on, answered; given up at once when its client hangs up."""

    def __init__(self, relay: Relay, request: Request) -> None:
        super().__init__()
        self._relay = relay
        self._request = request
        self._arrived = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = self._relay
        relay.running += 1
        end = "failed"
        try:
            end = await self._answered(scope, receive, send)
        finally:
            relay.running -= 1
            relay.meter.ended(end, time.monotonic() - self._arrived)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Do it; says how it ended."""
        answer = _Timed(send, self._relay, self._arrived)
        try:
            ask = await self._read()
            await self._unless_gone(ask, answer, receive)
        except Refusal as refusal:
            log.info("%s failed: %d %s", scope["path"], refusal.status, refusal.code or "")
            if answer.begun:
                await answer.end_with(refusal)
            else:
                await JsonResponse(refusal.body, refusal.status, refusal.headers)(scope, receive, send)
            return "failed" if refusal.status >= 500 else "refused"
        except _Gone:
            return "cancelled"
        return "answered" if answer.status < 400 else "refused" if answer.status < 500 else "failed"

    async def _read(self) -> Ask:
        request, limit = self._request, self._relay.limits.requests
        if self._relay.running > limit:
            raise unavailable(f"The relay has {limit} requests under way, and takes no more.", 1)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method == "GET":
            return Ask("GET", path, passed_on(request.headers.raw))
        return read_ask(path, request.headers.raw, await read_body(request))

    async def _unless_gone(self, ask: Ask, answer: Answer, receive: Receive) -> None:
        serving = asyncio.ensure_future(self._relay.serve(ask, answer, prefilled=ask.method == "POST"))
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise _Gone
            serving.result()
        finally:
            # What is under way at a server ends with its connection.
            for task in (serving, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({serving, gone})


class _Gone(Exception):
    """The client hung up."""


class _Timed(Answer):
    """An answer that says when it begins."""

    def __init__(self, send: Send, relay: Relay, arrived: float) -> None:
        super().__init__(send)
        self._relay = relay
        self._arrived = arrived

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._relay.meter.began(time.monotonic() - self._arrived)
        await super()._begin(status, headers)
