"""Starting and stopping the relay: its connections, the port, signals."""

from __future__ import annotations

import logging
import signal
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette

from retain.errors import ConfigError
from retain.gateway.server import ignore, listen, write_log
from retain.gateway.tenants import is_loopback
from retain.relay.app import application
from retain.relay.relay import Limits, Relay
from retain.relay.upstream import KEPT_SECONDS

log = logging.getLogger("retain.relay")


def run_relay(
    prefill: Sequence[str],
    decode: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8100,
    *,
    limits: Limits | None = None,
    grace: float = 30.0,
    allow_open: bool = False,
    log_level: str = "info",
) -> int:
    """Relay to the servers of these URLs until SIGTERM or SIGINT; the exit code. Running requests then have
    `grace` seconds to finish. Raises ConfigError.
    """
    if not (allow_open or is_loopback(host)):
        raise ConfigError(
            f"the relay asks for no key of its own, so binding to {host} would open every server behind it "
            "that asks for none either; bind to 127.0.0.1, or say --allow-open"
        )
    write_log(log_level)
    app = build_app(prefill, decode, limits or Limits())
    listener = listen(host, port)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=int(grace),
    )
    where = f"[{host}]" if ":" in host else host
    log.info(
        "listening on http://%s:%d; prefill: %s; decode: %s",
        where,
        listener.getsockname()[1],
        ", ".join(prefill) or "none",
        ", ".join(decode),
    )
    # uvicorn raises the signal again when it has ended well.
    before = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def build_app(prefill: Sequence[str], decode: Sequence[str], limits: Limits) -> Starlette:
    """The application over these servers, for any ASGI server. Raises ConfigError for what is no URL."""
    if not decode:
        raise ConfigError("a relay needs at least one server that answers: give --decode URL")
    secure = any(url.startswith("https:") for url in (*prefill, *decode))
    client = httpx.AsyncClient(
        # Environment variables name proxies for the way out, not for the servers of this house.
        trust_env=False,
        verify=ssl.create_default_context() if secure else False,
        limits=httpx.Limits(max_connections=None, keepalive_expiry=KEPT_SECONDS),
    )
    relay = Relay(prefill, decode, limits, client)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for server in relay.servers:
            server.remote.start()
        yield
        for server in relay.servers:
            server.remote.close()
        await client.aclose()

    return application(relay, lifespan)
