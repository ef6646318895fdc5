"""Servers on loopback for the tests of the gateway."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from retain.cache import Cache, open_cache
from retain.gateway.engine import Engine
from retain.gateway.server import build_app


def _client() -> httpx.Client:
    # Loading the certificates that https would need takes longer than a test.
    return httpx.Client(verify=False, timeout=60)  # noqa: S501


@dataclass
class Served:
    """A server under test."""

    url: str
    cache: Cache
    client: httpx.Client = field(default_factory=_client)
    official: Any = field(default_factory=lambda: openai.DefaultHttpxClient(verify=False, timeout=200))

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.official)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return self.client.get(self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {})

    def post(self, path: str, body: object, key: str | None = None) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        if isinstance(body, bytes):
            return self.client.post(self.url + path, content=body, headers=headers)
        return self.client.post(self.url + path, json=body, headers=headers)

    def metric(self, name: str, key: str | None = None) -> float:
        """The value of one line of /metrics, by its name and labels; 0 where there is none."""
        for line in self.get("/metrics", key).text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        return 0.0


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes to hold within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


Serve = Callable[..., Served]


def _servers() -> Iterator[Serve]:
    ends: list[Callable[[], None]] = []

    def start(engine: Engine, **options: object) -> Served:
        cache = open_cache("memory:16MiB")
        app = build_app(engine, cache, "toy", **options)  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert eventually(lambda: server.started)

        served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", cache)

        def end() -> None:
            server.should_exit = True
            thread.join(10)
            served.client.close()
            listener.close()
            cache.close()
            assert not thread.is_alive()

        ends.append(end)
        return served

    yield start
    for end in ends:
        end()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve an engine in this process: `serve(engine, api_keys={...}, max_queue=2)`."""
    yield from _servers()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    """The same for a server that a module's tests share."""
    yield from _servers()
