"""Starting and stopping: ports, loads that fail, signals, and what is flushed at the end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import retain
from retain.errors import ConfigError, UnsupportedModel
from retain.gateway import EngineOptions, run_server, serve
from retain.gateway.server import Opened
from retain.gateway.service import Service
from tests.gateway.conftest import Served, eventually
from tests.gateway.toy import ToyEngine

STOPPED = threading.Event()
BODY = {"model": "toy", "prompt": "x", "stream": True, "max_tokens": 4000}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def served_while(
    open_model: Callable[[], Opened], client: Callable[[Served], Any], *, grace: float = 5.0
) -> tuple[int, list[Any]]:
    """Serve in this thread while `client` talks to the server from another; the exit code and its results."""
    port = free_port()
    results: list[Any] = []
    STOPPED.clear()

    def talk() -> None:
        served = Served(f"http://127.0.0.1:{port}", None)  # type: ignore[arg-type]
        try:
            results.append(client(served))
        finally:
            stop()

    talker = threading.Thread(target=talk)
    talker.start()
    code = serve(Service("toy"), open_model, {}, port=port, grace=grace)
    talker.join(10)
    assert not talker.is_alive()
    return code, results


def stop() -> None:
    """Signal the server's end, once: a second signal could find the server gone, and end the tests."""
    if not STOPPED.is_set():
        STOPPED.set()
        os.kill(os.getpid(), signal.SIGTERM)


def state(served: Served) -> str:
    try:
        status: str = served.get("/health").json()["status"]
    except httpx.TransportError:
        return "closed"
    return status


def test_while_the_model_loads_the_port_answers_that_it_does() -> None:
    gate = threading.Event()

    def open_model() -> Opened:
        gate.wait(10)
        return ToyEngine(), retain.open("memory:1MiB")

    def client(served: Served) -> None:
        assert eventually(lambda: state(served) == "loading")
        assert served.get("/health").status_code == 503
        assert served.get("/metrics").status_code == 200
        assert served.get("/v1/models").json()["data"][0]["id"] == "toy"
        refused = served.post("/v1/completions", BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        gate.set()
        assert eventually(lambda: state(served) == "ok")
        assert served.post("/v1/completions", BODY).status_code == 200

    assert served_while(open_model, client) == (0, [None])


def test_a_server_that_is_stopped_while_it_loads_ends_at_once_and_well() -> None:
    gate = threading.Event()

    def open_model() -> Opened:
        gate.wait(30)
        return ToyEngine(), retain.open("memory:1MiB")

    began = time.monotonic()
    code, _ = served_while(open_model, lambda served: eventually(lambda: state(served) == "loading"))
    gate.set()
    assert code == 0
    assert time.monotonic() - began < 10


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason() -> None:
    def open_model() -> Opened:
        raise UnsupportedModel("layer 3 is of a kind that is not known")

    with pytest.raises(UnsupportedModel, match="layer 3"):
        serve(Service("toy"), open_model, {}, port=free_port())


def test_a_port_in_use_is_named_before_anything_is_loaded() -> None:
    def open_model() -> Opened:
        raise AssertionError("it was loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            serve(Service("toy"), open_model, {}, port=port)


def test_settings_that_cannot_be_used_are_refused_before_the_port_opens() -> None:
    with pytest.raises(ConfigError, match="without API keys"):
        run_server("smollm2", [], host="0.0.0.0")
    with pytest.raises(ConfigError, match="there is no model"):
        run_server("no-such-model", [])
    with pytest.raises(ConfigError, match="NAME=KEY"):
        run_server("smollm2", [], api_keys=["nonsense"])
    with pytest.raises(ConfigError, match="log level"):
        run_server("smollm2", [], log_level="loud")


def test_a_stopped_server_finishes_what_runs(tmp_path: Path) -> None:
    engine = ToyEngine("x" * 100, pace=0.01)
    cache = retain.open("memory:1MiB", f"disk:{tmp_path}")

    def client(served: Served) -> str:
        assert eventually(lambda: state(served) == "ok")
        with served.client.stream("POST", f"{served.url}/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            next(lines)
            stop()
            assert list(lines)[-2] == "data: [DONE]"
        return "whole"

    assert served_while(lambda: (engine, cache), client) == (0, ["whole"])
    assert engine.steps == 101
    assert cache.stats().pending_writes == 0


def test_what_does_not_finish_in_time_is_cancelled_and_its_client_told() -> None:
    engine = ToyEngine("x" * 4000, pace=0.01)

    def client(served: Served) -> str:
        assert eventually(lambda: state(served) == "ok")
        with served.client.stream("POST", f"{served.url}/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            next(lines)
            stop()
            rest = list(lines)
        assert "[DONE]" not in "".join(rest)
        return rest[-2]

    began = time.monotonic()
    code, results = served_while(lambda: (engine, retain.open("memory:1MiB")), client, grace=0.3)
    assert code == 0
    assert "The server is stopping." in results[0]
    assert engine.ended == 1
    assert time.monotonic() - began < 15


def test_kv_is_interchanged_as_it_is_held_or_in_float16() -> None:
    assert EngineOptions(interchange="float16").interchange == "float16"
    with pytest.raises(ConfigError, match="bfloat16"):
        EngineOptions(interchange="bfloat16")


@pytest.mark.engine
def test_what_is_llama_cpps_own_is_refused_with_its_name_for_another_engine() -> None:
    pytest.importorskip("transformers")
    from retain.gateway.local import open_engine
    from retain.models import find

    for options in (EngineOptions(flash=False), EngineOptions(context=512)):
        with pytest.raises(ConfigError, match="--engine llamacpp"):
            open_engine(
                "transformers",
                find("smollm2"),
                ["memory:8MiB"],
                policy="lru",
                audit=0.0,
                fidelity="kin",
                options=options,
            )
