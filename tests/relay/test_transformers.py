"""Prefill by one `retain serve`, decode by another, over one daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from retain.bench.server import OwnDaemons, ServerProcess
from retain.bench.texts import source_of

from .conftest import Relay

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

Pair = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        daemons = stack.enter_context(OwnDaemons())
        options = ["--tier", "memory:256MiB", "--name", "model"]
        first, second = (
            ServerProcess(str(model), options, tmp_path_factory.mktemp("server"), daemons) for _ in range(2)
        )
        other = threading.Thread(target=first.__enter__)  # both load at the same time
        other.start()
        stack.callback(first.stop)
        stack.enter_context(second)
        other.join()
        yield first, second


def chat(size: int) -> dict[str, Any]:
    return {
        "model": "model",
        "messages": [{"role": "user", "content": source_of("textwrap")[:size]}],
        "temperature": 0,
        "max_tokens": 12,
    }


def test_what_one_server_prefilled_another_answers(pair: Pair, relay: Relay) -> None:
    prefill, decode = pair
    front = relay([prefill.url], [decode.url])
    for size in (1300, 4000):
        asked = chat(size)
        alone = httpx.post(f"{decode.url}/v1/chat/completions", json={**asked, "cache_salt": "x"}, timeout=60)
        relayed = front.post("/v1/chat/completions", asked).json()
        assert relayed["choices"][0]["message"] == alone.json()["choices"][0]["message"]
        assert relayed["retain"]["tokens"]["computed"] <= 16
        assert relayed["retain"]["tokens"]["memory"] > 256
    assert front.metric('retain_relay_prefills_total{result="done"}') == 2


def test_a_server_says_what_it_hands_over_when_it_is_asked(pair: Pair) -> None:
    asked = {**chat(2000), "max_tokens": 1}
    url = f"{pair[0].url}/v1/chat/completions"
    assert "kv_transfer_params" not in httpx.post(url, json=asked, timeout=60).json()
    told = httpx.post(
        url, json={**asked, "kv_transfer_params": {"do_remote_decode": True}}, timeout=60
    ).json()
    kept = told["kv_transfer_params"]["retain"]["tokens"]
    assert told["usage"]["prompt_tokens"] - 16 <= kept <= told["usage"]["prompt_tokens"]


def test_a_promise_that_is_not_kept_costs_a_stated_time(pair: Pair) -> None:
    asked = {**chat(300), "cache_salt": "none", "kv_transfer_params": {"retain": {"tokens": 90}}}
    began = time.monotonic()
    told = httpx.post(f"{pair[1].url}/v1/chat/completions", json=asked, timeout=60)
    assert told.status_code == 200
    assert 1.9 < time.monotonic() - began < 20
