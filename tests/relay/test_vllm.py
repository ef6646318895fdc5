"""Prefill by one vLLM, decode by another, over one daemon: what arrives, and what a death costs."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from retain.bench.server import OwnDaemons
from retain.bench.vllm_server import VllmServer
from tests.gateway.conftest import Served

from .conftest import Relay

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

PREFILL_SECONDS, DECODE_SECONDS = 30.0, 60.0
# Without a plan: this model is so small that computing is often predicted to be faster than loading.
SETTINGS = {"tiers": ["daemon", "memory:256MiB"], "plan": False}
OPTIONS = ["--max-model-len", "4096", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "60000000"]
OPTIONS += ["--no-enable-prefix-caching"]


@dataclass
class Pair:
    """The two servers; every test's relay stands before them."""

    prefill: VllmServer
    decode: VllmServer


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    with OwnDaemons() as daemons:
        environment = {**daemons.environment, "OMP_NUM_THREADS": "1"}
        # Small steps: a prompt is computed, and so stored, in many pieces (A5).
        steps = ["--max-num-batched-tokens", "128", *OPTIONS]
        with (
            VllmServer(model, folder, "kv_producer", SETTINGS, steps, environment) as prefill,
            VllmServer(model, folder, "kv_consumer", SETTINGS, OPTIONS, environment) as decode,
        ):
            prefill.wait()
            decode.wait()
            yield Pair(prefill, decode)


@pytest.fixture
def front(pair: Pair, relay: Relay) -> Served:
    return relay(
        [pair.prefill.url],
        [pair.decode.url],
        prefill_seconds=PREFILL_SECONDS,
        decode_seconds=DECODE_SECONDS,
    )


def body(length: int, seed: int, **fields: Any) -> dict[str, Any]:
    draw = random.Random(f"{seed}")
    ids = [draw.randrange(1000, 40_000) for _ in range(length)]
    return {"model": "model", "prompt": ids, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **fields}


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def post(url: str, asked: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(url + path, json=asked, timeout=120, trust_env=False)


def computed(server: VllmServer) -> float:
    """How many tokens a server has computed so far, of prompts and answers."""
    return server.metric("vllm:iteration_tokens_total_sum")


@pytest.mark.parametrize("length", [65, 257, 300, 700, 1050])
def test_a5_every_prompt_token_arrives_and_decoding_starts_within_one_step(
    pair: Pair, front: Served, length: int
) -> None:
    asked = body(length, length)
    alone = text(post(pair.decode.url, {**asked, "cache_salt": "alone"}))
    hits, before = pair.decode.metric("vllm:external_prefix_cache_hits_total"), computed(pair.decode)
    assert text(front.post("/v1/completions", asked)) == alone
    assert pair.decode.metric("vllm:external_prefix_cache_hits_total") - hits == length - 1
    assert computed(pair.decode) - before == 1 + 8  # the prompt's last token; and vLLM counts those generated
    assert front.metric('retain_relay_prefills_total{result="done"}') == 1


def test_a_chat_is_streamed_as_a_single_server_would(pair: Pair, front: Served) -> None:
    words = " ".join(f"word{n}" for n in range(150))
    asked = {
        "model": "model",
        "messages": [{"role": "user", "content": words}],
        "temperature": 0,
        "max_completion_tokens": 12,
        "stream": True,
    }

    def said(answer: httpx.Response) -> str:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    alone = post(pair.decode.url, {**asked, "cache_salt": "alone"}, "/v1/chat/completions")
    before = computed(pair.decode)
    relayed = front.post("/v1/chat/completions", asked)
    assert said(relayed) == said(alone) != ""
    assert relayed.text.endswith("data: [DONE]\n\n")
    assert computed(pair.decode) - before <= 16 + 12  # a tail of less than 16 tokens is not looked for


def test_many_at_once_are_answered_as_alone(pair: Pair, front: Served) -> None:
    asked = [body(410 + 30 * n, 100 + n) for n in range(8)]
    alone = [text(post(pair.decode.url, {**each, "cache_salt": "alone"})) for each in asked]
    hits = pair.decode.metric("vllm:external_prefix_cache_hits_total")
    got: dict[int, str] = {}

    def ask(number: int) -> None:
        got[number] = text(front.post("/v1/completions", asked[number]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [got[number] for number in range(8)] == alone
    arrived = pair.decode.metric("vllm:external_prefix_cache_hits_total") - hits
    assert arrived == sum(len(each["prompt"]) - 1 for each in asked)


# The deaths come last: the servers are dead afterwards.


def test_kill_9_of_the_prefill_server_is_answered_by_the_decode_server(pair: Pair, front: Served) -> None:
    asked = body(3900, 7)
    alone = text(post(pair.decode.url, {**asked, "cache_salt": "alone"}))
    threading.Timer(0.3, pair.prefill.kill).start()
    began = time.monotonic()
    assert text(front.post("/v1/completions", asked)) == alone
    assert time.monotonic() - began < PREFILL_SECONDS + DECODE_SECONDS
    assert front.metric('retain_relay_prefill_failures_total{reason="broken"}') == 1
    assert text(front.post("/v1/completions", body(300, 8))) != ""


def test_kill_9_of_the_decode_server_ends_in_an_error(pair: Pair, front: Served) -> None:
    asked = body(300, 9, max_tokens=3000, stream=True)
    began = time.monotonic()
    events = []
    with front.client.stream("POST", f"{front.url}/v1/completions", json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 3:
                    pair.decode.kill()
    assert events[-1]["error"]["code"] == "decode_failed"
    assert "choices" in events[0]
    again = front.post("/v1/completions", asked)
    assert again.status_code in (502, 503)
    assert again.json()["error"]["type"] == "server_error"
    assert time.monotonic() - began < DECODE_SECONDS
