"""A relay on loopback, and the servers behind it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from retain.bench.services import Running, free_port, running
from retain.relay import build_app
from retain.relay.relay import Limits
from tests.gateway.conftest import Served, eventually, serve, serve_module

__all__ = ["serve", "serve_module"]  # fixtures

ROOT = Path(__file__).parents[2]

Relay = Callable[..., Served]
Process = Callable[..., Running]


@pytest.fixture
def relay() -> Iterator[Relay]:
    """Relay to servers in this process: `relay([prefill URLs], [decode URLs], min_prompt=1)`."""
    with ExitStack() as stack:

        def start(prefill: Sequence[str], decode: Sequence[str], **limits: Any) -> Served:
            limits = {"min_prompt": 1, "prefill_seconds": 10.0, "decode_seconds": 10.0, **limits}
            app = build_app(prefill, decode, Limits(**limits))
            listener = socket.create_server(("127.0.0.1", 0))
            config = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            assert eventually(lambda: server.started)
            served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", None)  # type: ignore[arg-type]

            def end() -> None:
                server.should_exit = True
                thread.join(10)
                served.client.close()
                served.official.close()
                listener.close()
                assert not thread.is_alive()

            stack.callback(end)
            return served

        yield start


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A toy server in a process of its own: `process("Name ", pace=0.01)`."""
    with ExitStack() as stack:

        def start(name: str, pace: float = 0.0, port: int | None = None) -> Running:
            port = port or free_port()
            command = [sys.executable, "-m", "tests.relay.toy_process", str(port), name, str(pace)]
            started: AbstractContextManager[Running] = running(command, port, tmp_path / f"{port}.log")
            before = os.getcwd()
            os.chdir(ROOT)
            try:
                return stack.enter_context(started)
            finally:
                os.chdir(before)

        yield start


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that speaks SmolLM2's tokens."""
    import torch
    import transformers

    from retain.engines.transformers.loading import prepared

    folder = tmp_path_factory.mktemp("model")
    smollm2 = prepared("smollm2")
    for path in smollm2.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=49152,
        max_position_embeddings=4096,
        initializer_range=0.15,
    )
    network: Any = transformers.LlamaForCausalLM(config)
    network.float().save_pretrained(folder)
    return folder
