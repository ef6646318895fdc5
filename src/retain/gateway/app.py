"""The HTTP application: OpenAI's paths, and Retain's own for health, metrics and the cache."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retain.gateway.answers import Account, Form
from retain.gateway.generation import Piece, joined
from retain.gateway.metrics import CONTENT_TYPE
from retain.gateway.refusal import Refusal
from retain.gateway.schema import Ask, read_chat, read_completion, read_object
from retain.gateway.service import Service
from retain.gateway.tenants import Tenant, Tenants
from retain.gateway.waiting import Job
from retain.gateway.wire import DONE, EventStream, Gone, JsonResponse, event, hung_up, read_body, until_gone

log = logging.getLogger("retain.gateway")

LARGE_BYTES = 64 << 10

Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def application(service: Service, tenants: Tenants, lifespan: Lifespan | None = None) -> Starlette:
    """The application in front of a service. It can be served before the service's model is loaded."""
    paths = _Paths(service, tenants)
    routes = [
        ("/v1/models", "GET", paths.models),
        ("/v1/models/{model:path}", "GET", paths.model),
        ("/v1/chat/completions", "POST", paths.chat),
        ("/v1/completions", "POST", paths.completion),
        ("/v1/cache/clear", "POST", paths.clear),
        ("/v1/cache/stats", "GET", paths.stats),
        ("/health", "GET", paths.health),
        ("/metrics", "GET", paths.metrics),
    ]

    @asynccontextmanager
    async def alone(_: Starlette) -> AsyncIterator[None]:
        yield
        service.stop()
        service.line.cancel_all()

    return Starlette(
        routes=[
            Route(path, paths.guarded(path, handler), methods=[method]) for path, method, handler in routes
        ],
        exception_handlers={HTTPException: no_such_path},
        lifespan=lifespan or alone,
    )


async def no_such_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    said = "there is no such path" if status == 404 else "the path does not take this method"
    refusal = Refusal(
        status,
        f"{request.method} {request.url.path[:200]}: {said}",
        code="not_found" if status == 404 else None,
    )
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return JsonResponse(refusal.body, status, headers)


class _Paths:
    """One method a path."""

    def __init__(self, service: Service, tenants: Tenants) -> None:
        self._service = service
        self._tenants = tenants

    def guarded(self, path: str, handler: Handler) -> Handler:
        """The handler with refusals as bodies, every response counted, and refused ones named in the log."""

        async def guard(request: Request) -> Response:
            try:
                response = await handler(request)
            except Refusal as refusal:
                response = JsonResponse(refusal.body, refusal.status, refusal.headers)
                # The message may quote the request; the log must not hold what users write.
                log.info(
                    "%s %s refused: %d %s %s",
                    request.method,
                    path,
                    refusal.status,
                    refusal.code or "",
                    refusal.param or "",
                )
            except Exception:
                log.exception("%s failed", path)
                response = JsonResponse(
                    Refusal(500, "The server had an error.", code="internal_error").body, 500
                )
            self._service.meter.responded(path, response.status_code)
            return response

        return guard

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._tenant(request)
        self._service.check_model(request.path_params["model"])
        return JsonResponse(self._model())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat)

    async def completion(self, request: Request) -> Response:
        return await self._generate(request, read_completion)

    async def clear(self, request: Request) -> Response:
        tenant = self._tenant(request)
        given = read_object(await read_body(request), ("all", "tier", "cache_salt"))
        everything, tier, salt = given.get("all", False), given.get("tier"), given.get("cache_salt")
        if not isinstance(everything, bool):
            raise Refusal(400, "all must be true or false", param="all")
        for name, value in (("tier", tier), ("cache_salt", salt)):
            if value is not None and not isinstance(value, str):
                raise Refusal(400, f"{name} must be a text", param=name)
        if everything:
            self._tenants.operator(request.headers.get("authorization"))
        service = self._service
        removed = await service.aside(
            service.clear, tenant, everything=everything, tier=tier, cache_salt=salt
        )
        return JsonResponse(removed)

    async def stats(self, request: Request) -> Response:
        tenant = self._tenant(request)
        told: dict[str, Any] = {"tenant": tenant.name, "totals": self._service.totals(tenant)}
        if tenant.is_operator:
            stats = await asyncio.to_thread(self._service.stats)
            told["cache"] = None if stats is None else asdict(stats)
        return JsonResponse(told)

    async def health(self, request: Request) -> Response:
        service = self._service
        tiers: dict[str, Any] | None = {}
        try:
            stats = await asyncio.to_thread(service.stats)
            tiers = {name: asdict(tier) for name, tier in stats.tiers.items()} if stats else {}
        except Exception:
            log.exception("the state of the tiers cannot be had")
            tiers = None
        state = {
            "status": service.state,
            "model": service.name,
            "queue": {
                "waiting": service.line.waiting,
                "running": service.line.running,
                "limit": service.line.limit,
            },
            "tiers": tiers,
        }
        return JsonResponse(state, 200 if service.state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        self._tenants.operator(request.headers.get("authorization"))
        text = await asyncio.to_thread(self._service.meter.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    def _tenant(self, request: Request) -> Tenant:
        return self._tenants.of(request.headers.get("authorization"))

    def _model(self) -> dict[str, Any]:
        service = self._service
        told: dict[str, Any] = {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "retain",
        }
        if service.state == "ok":
            told["max_model_len"] = service.loaded.engine.context
        return told

    async def _generate(self, request: Request, read: Callable[[bytes], Ask]) -> Response:
        arrived = time.monotonic()
        service = self._service
        tenant = self._tenant(request)
        body = await read_body(request)
        # A large body takes longer to read than /health should have to wait.
        ask = read(body) if len(body) < LARGE_BYTES else await service.aside(read, body)
        service.check_model(ask.model)
        prompt, wish = await service.aside(service.prepare, ask)
        job = service.submit(ask, tenant, prompt, wish, arrived)
        form = Form(ask.is_chat, service.name, service.fingerprint, ask.include_usage)
        if ask.stream:
            return EventStream(job.events, _Chunks(form), lambda: service.leave(job))
        return await self._whole(request, form, job)

    async def _whole(self, request: Request, form: Form, job: Job) -> Response:
        pieces: list[Piece] = []
        gone = asyncio.ensure_future(hung_up(request.receive))
        try:
            while True:
                got = await until_gone(job.events.get(), gone)
                if isinstance(got, Piece):
                    pieces.append(got)
                elif isinstance(got, Account):
                    return JsonResponse(form.whole(joined(pieces), got))
                else:
                    raise got
        except Gone:
            raise Refusal(499, "the client hung up") from None
        finally:
            gone.cancel()
            self._service.leave(job)


class _Chunks:
    """Renders the events of one streamed answer: bytes to send, and whether more will follow."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._opened = not form.chat
        self._calls = 0

    def __call__(self, got: Any) -> tuple[bytes, bool]:
        if isinstance(got, Refusal):
            return event(got.body), False
        data = b""
        if not self._opened:
            self._opened = True
            data = event(self._form.opening())
        if isinstance(got, Account):
            return data + b"".join(map(event, self._form.ending(got))) + DONE, False
        data += event(self._form.chunk(got, self._calls))
        self._calls += len(got.calls)
        return data, True
