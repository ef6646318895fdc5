"""The relay as a proxy: what each server is sent, what the client gets back, and what happens on failures."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from retain.bench.chaos.proxy import Proxy
from retain.bench.services import free_port
from retain.errors import ConfigError
from retain.relay.relay import Limits
from retain.relay.server import build_app, run_relay
from tests.gateway.conftest import Serve, Served, eventually
from tests.gateway.toy import ToyEngine

from .conftest import Process, Relay
from .recorder import Recorder

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Hello, how are you?"}]}
TEXT: dict[str, Any] = {"model": "toy", "prompt": "Hello, how are you?", "max_tokens": 400}


class Pair:
    """A prefill and a decode server with toy engines, ways to them that can be spoilt, and a relay."""

    def __init__(self, serve: Serve, relay: Relay, prefill: Proxy, decode: Proxy, **limits: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefiller, self.decoder = ToyEngine("Prefilled."), ToyEngine("Decoded.")
        prefill.target = _port(serve(self.prefiller))
        self.alone = serve(self.decoder)
        decode.target = _port(self.alone)
        self.relay = relay([_url(prefill)], [_url(decode)], **limits)

    def settle(self) -> None:
        """Wait until the servers have been pinged: from then on it is requests that find what is spoilt."""
        assert eventually(
            lambda: {each["state"] for each in self.relay.get("/health").json()["servers"]} == {"up"}
        )

    def failures(self, role: str, reason: str) -> float:
        return self.relay.metric(f'retain_relay_{role}_failures_total{{reason="{reason}"}}')

    def ended(self, how: str) -> float:
        """Requests that ended so; the client may have its answer a moment before it is counted."""
        return self.relay.metric(f'retain_relay_requests_total{{end="{how}"}}')

    def prefills(self, result: str) -> float:
        return self.relay.metric(f'retain_relay_prefills_total{{result="{result}"}}')


def _port(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def _url(proxy: Proxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"


@pytest.fixture
def pair(serve: Serve, relay: Relay) -> Any:
    with Proxy(0) as prefill, Proxy(0) as decode:
        yield lambda **limits: Pair(serve, relay, prefill, decode, **limits)


# what each server is sent, what comes back


def test_a_prompt_is_prefilled_by_one_server_and_answered_by_the_other(pair: Callable[..., Pair]) -> None:
    both = pair()
    answer = both.relay.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 5}).json()
    assert answer["choices"][0]["message"]["content"] == "Decod"
    (prefilled, once, _), (decoded, asked, _) = both.prefiller.started[0], both.decoder.started[0]
    assert prefilled == decoded
    assert (once.max_tokens, asked.max_tokens) == (1, 5)
    assert both.prefills("done") == 1
    assert eventually(lambda: both.ended("answered") == 1)
    assert both.relay.metric("retain_relay_prefill_seconds_count") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_answers_are_those_of_the_decode_server(
    pair: Callable[..., Pair], path: str, body: dict[str, Any], stream: bool
) -> None:
    both = pair()
    asked = {**body, "stream": stream, "seed": 3}
    direct, relayed = both.alone.post(path, asked), both.relay.post(path, asked)

    def rest(answer: httpx.Response) -> bytes:
        """An answer without what differs between any two: ids and times."""
        kept = re.sub(rb'"(id|created)":("[^"]*"|[0-9]+)', b"", answer.content)
        return re.sub(rb'"retain":{.*}', b"", kept)

    assert rest(relayed) == rest(direct)
    assert relayed.status_code == direct.status_code == 200
    own = {"content-length", "transfer-encoding", "date"}
    assert {k: v for k, v in relayed.headers.items() if k not in own} == {
        k: v for k, v in direct.headers.items() if k not in own
    }


def test_an_event_stream_comes_through_byte_for_byte(relay: Relay) -> None:
    raw = b": a comment\r\n\r\ndata: {}\n\nevent: x\n" + bytes(range(256)) * 999 + b"without an end"
    with Recorder(raw=raw) as decode:
        assert relay([], [decode.url]).post("/v1/completions", {**TEXT, "stream": True}).content == raw


def test_tokens_come_through_one_by_one(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.decoder.pace = 0.1
    with both.relay.openai() as client:
        chunks = client.completions.create(**TEXT, stream=True)
        came = [(time.monotonic(), chunk.choices[0].text) for chunk in chunks]
    assert "".join(text for _, text in came) == "Decoded."
    assert came[-2][0] - came[0][0] > 0.4


def test_the_decode_server_gets_the_body_as_it_came_and_both_get_the_headers(relay: Relay) -> None:
    with Recorder({}) as prefill, Recorder({}) as decode:
        front = relay([prefill.url], [decode.url + "/v1/"])
        body = b'{ "model":"toy",\n "prompt": [1, 2, 3], "seed": 1e0, "unknown": "\\u00e9", "stream": false }'
        headers = {"Content-Type": "application/json", "X-Tenant": "ann", "Authorization": "Bearer ann-key"}
        front.client.post(f"{front.url}/v1/completions?x=1", content=body, headers=headers)
        (asked,), (answered,) = prefill.got, decode.got
        assert answered.body == body
        assert asked.path == answered.path == "/v1/completions?x=1"
        for each in (asked, answered):
            assert each.headers["x-tenant"] == "ann"
            assert each.headers["authorization"] == "Bearer ann-key"
        assert json.loads(asked.body) == {
            "model": "toy",
            "prompt": [1, 2, 3],
            "seed": 1.0,
            "unknown": "é",
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }


def test_what_the_prefill_server_hands_over_reaches_the_decode_server_and_its_own_the_client(
    relay: Relay,
) -> None:
    handed = {"do_remote_prefill": True, "retain": {"tokens": 7}}
    with (
        Recorder({"kv_transfer_params": handed}) as prefill,
        Recorder({"kv_transfer_params": {"a": 1}}) as decode,
    ):
        front = relay([prefill.url], [decode.url])
        answer = front.post("/v1/chat/completions", {**CHAT, "kv_transfer_params": {"room": 5}})
        assert json.loads(prefill.got[0].body)["kv_transfer_params"]["room"] == 5
        assert json.loads(decode.got[0].body) == {**CHAT, "kv_transfer_params": {"room": 5, **handed}}
        assert answer.json()["kv_transfer_params"] == {"a": 1}


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"prompt": "x" * 300}, "short"),
        ({"prompt": [1] * 99}, "short"),
        ({"prompt": [[1] * 50, [2] * 49]}, "short"),
        ({"prompt": "x" * 400}, "done"),
        ({"prompt": [1] * 100}, "done"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "short"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}]}, "done"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "done"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "y" * 400}]}, "done"),
        ({"prompt": [1] * 100, "prompt_logprobs": 1}, "whole"),
        ({"prompt": [1] * 100, "echo": True, "logprobs": 0}, "whole"),
        ({"prompt": [1] * 100, "kv_transfer_params": {"do_remote_prefill": True}}, "handed"),
        ({"prompt": 7}, "short"),
    ],
)
def test_a_prompt_is_prefilled_elsewhere_only_where_that_can_pay(
    relay: Relay, body: dict[str, Any], result: str
) -> None:
    with Recorder({}) as prefill, Recorder({}) as decode:
        front = relay([prefill.url], [decode.url], min_prompt=100)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert front.post(path, body).status_code == 200
        assert front.metric(f'retain_relay_prefills_total{{result="{result}"}}') == 1
        assert len(prefill.got) == (result == "done")


def test_models_are_those_of_the_decode_server(pair: Callable[..., Pair]) -> None:
    both = pair()
    assert both.relay.get("/v1/models").json() == both.alone.get("/v1/models").json()
    assert both.relay.get("/v1/models/toy").json()["id"] == "toy"
    assert both.relay.get("/v1/models/none").status_code == 404


def test_refusals_of_the_decode_server_are_passed_on(pair: Callable[..., Pair]) -> None:
    both = pair()
    answer = both.relay.post("/v1/completions", {**TEXT, "max_tokens": 10**6})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert eventually(lambda: both.ended("refused") == 1)
    assert both.relay.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("body", "status"), [(b"[1]", 400), (b"{", 400), (b'{"a": "' + b"x" * (17 << 20) + b'"}', 413)]
)
def test_bodies_that_are_none_reach_no_server(relay: Relay, body: bytes, status: int) -> None:
    with Recorder({}) as server:
        front = relay([server.url], [server.url])
        answer = front.post("/v1/completions", body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert server.got == []


# failures


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"refuse": True}, "broken"),
        ({"status": 500}, "status"),
        ({"status": 503}, "busy"),
        ({"status": 401}, "rejected"),
        ({"silent": True}, "timeout"),
        ({"half": 50}, "broken"),
    ],
)
def test_where_the_prefill_fails_the_decode_server_computes(
    pair: Callable[..., Pair], spoil: dict[str, Any], reason: str
) -> None:
    both = pair(prefill_seconds=0.5)
    both.settle()
    for name, value in spoil.items():
        setattr(both.prefill, name, value)
    began = time.monotonic()
    answer = both.relay.post("/v1/completions", TEXT)
    assert answer.json()["choices"][0]["text"] == "Decoded."
    assert time.monotonic() - began < 3
    assert both.failures("prefill", reason) == 1
    assert both.prefills("failed") == 1


def test_a_prefill_server_that_is_not_there_is_left_alone_until_it_answers_again(
    pair: Callable[..., Pair],
) -> None:
    both = pair()
    both.settle()
    both.prefill.refuse = True
    both.prefill.reset()
    for _ in range(5):
        assert both.relay.post("/v1/completions", TEXT).status_code == 200
    assert both.failures("prefill", "down") > 0
    assert both.relay.get("/health").json()["status"] == "degraded"
    both.prefill.refuse = False
    assert eventually(lambda: both.relay.get("/health").json()["status"] == "ok")
    before = both.prefills("done")
    both.relay.post("/v1/completions", TEXT)
    assert both.prefills("done") == before + 1


def test_another_prefill_server_is_asked_where_one_fails(
    pair: Callable[..., Pair], relay: Relay, serve: Serve
) -> None:
    both = pair()
    both.prefill.status = 500
    second = ToyEngine()
    front = relay([_url(both.prefill), serve(second).url], [both.alone.url])
    assert front.post("/v1/completions", TEXT).status_code == 200
    assert len(second.started) == 1
    assert front.metric('retain_relay_prefills_total{result="done"}') == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("spoil", "status"), [({"refuse": True}, 502), ({"status": 500}, 502), ({"silent": True}, 504)]
)
def test_where_the_decode_server_fails_the_client_is_told_in_time(
    pair: Callable[..., Pair], spoil: dict[str, Any], status: int, stream: bool
) -> None:
    both = pair(decode_seconds=0.5)
    both.settle()
    for name, value in spoil.items():
        setattr(both.decode, name, value)
    began = time.monotonic()
    with both.relay.openai() as client, pytest.raises(openai.APIStatusError) as error:
        client.completions.create(**TEXT, stream=stream)
    assert time.monotonic() - began < 3
    assert error.value.status_code == status
    assert error.value.code == "decode_failed"
    assert f"127.0.0.1:{both.decode.port}" in error.value.message
    assert eventually(lambda: both.ended("failed") == 1)


@pytest.mark.parametrize("spoil", [{"refuse": True}, {"status": 500}, {"status": 503}, {"half": 100}])
@pytest.mark.parametrize("stream", [False, True])
def test_another_decode_server_is_asked_before_the_first_byte(
    pair: Callable[..., Pair], relay: Relay, serve: Serve, spoil: dict[str, Any], stream: bool
) -> None:
    both = pair()
    for name, value in spoil.items():
        setattr(both.decode, name, value)
    front = relay([], [_url(both.decode), serve(ToyEngine("Second.")).url])
    answer = front.post("/v1/completions", {**TEXT, "stream": stream})
    assert answer.status_code == 200
    assert _text(answer) == "Second."


def _text(answer: httpx.Response) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for each in events for choice in json.loads(each)["choices"])


def test_a_stream_that_breaks_ends_with_an_error_that_clients_understand(
    pair: Callable[..., Pair],
) -> None:
    both = pair()
    both.decoder.script, both.decoder.pace = b"x" * 300, 0.01
    threading.Timer(0.5, both.decode.reset).start()
    with both.relay.openai() as client, pytest.raises(openai.APIError, match="decode server") as error:
        for _ in client.completions.create(**TEXT, stream=True):
            pass
    assert error.value.code == "decode_failed"
    assert both.failures("decode", "broken") == 1


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_an_error_never_joins_a_line_that_was_cut(relay: Relay, cut: int) -> None:
    first = b'data: {"choices":[{"index":0,"text":"one"}]}\n\n'
    second = b'data: {"choices":[{"index":0,"text":"two"}]}\r\n\r\n'
    with Recorder(raw=first + second[:cut], cut=True) as decode:
        front = relay([], [decode.url])
        answer = front.post("/v1/completions", {**TEXT, "stream": True})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [each["choices"][0]["text"] for each in events if "choices" in each] == ["one", "two"][
            : 1 + (cut >= len(second) - 3)
        ]
        assert events[-1]["error"]["code"] == "decode_failed"


def test_a_server_that_falls_silent_in_the_middle_is_given_up_after_the_stated_time(
    pair: Callable[..., Pair],
) -> None:
    both = pair(decode_seconds=0.7)
    both.decoder.script, both.decoder.pace = b"x" * 300, 0.01
    threading.Timer(0.5, lambda: setattr(both.decode, "silent", True)).start()
    began = time.monotonic()
    answer = both.relay.post("/v1/completions", {**TEXT, "stream": True})
    assert 0.7 <= time.monotonic() - began < 4
    assert "decode_failed" in answer.text
    assert "data: [DONE]" not in answer.text


def test_without_any_decode_server_the_relay_says_so_and_recovers(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.settle()
    both.decode.refuse = True
    both.decode.reset()
    codes = [both.relay.post("/v1/completions", TEXT).status_code for _ in range(5)]
    assert codes[0] == 502
    assert codes[-1] == 503
    assert both.relay.get("/health").status_code == 503
    both.decode.refuse = False
    assert eventually(lambda: both.relay.get("/health").status_code == 200)
    assert both.relay.post("/v1/completions", TEXT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_the_work_at_the_server(pair: Callable[..., Pair], stream: bool) -> None:
    both = pair()
    both.decoder.script, both.decoder.pace = b"x" * 4000, 0.01
    with pytest.raises(httpx.ReadTimeout):
        both.relay.client.post(
            f"{both.relay.url}/v1/completions",
            json={**TEXT, "max_tokens": 3000},
            headers={"Content-Type": "application/json"},
            timeout=0.5,
        ) if not stream else _hang_up(both.relay)
    assert eventually(lambda: both.decoder.ended == 1)
    assert both.decoder.steps < 1000
    assert eventually(lambda: both.ended("cancelled") == 1)
    assert both.relay.metric("retain_relay_running") == 0


def _hang_up(front: Served) -> None:
    with front.client.stream(
        "POST", f"{front.url}/v1/completions", json={**TEXT, "max_tokens": 3000, "stream": True}
    ) as answer:
        next(answer.iter_raw())
    raise httpx.ReadTimeout("hung up")


def test_a_client_that_hangs_up_during_the_prefill_ends_that(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.prefiller.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        both.relay.client.post(f"{both.relay.url}/v1/completions", json=TEXT, timeout=0.3)
    assert eventually(lambda: both.prefiller.ended == 1)
    assert both.decoder.started == []


def test_more_requests_than_allowed_are_refused_at_once(pair: Callable[..., Pair]) -> None:
    both = pair(requests=2)
    both.decoder.gate.clear()
    threads = [
        threading.Thread(target=both.relay.post, args=("/v1/completions", TEXT), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: both.relay.metric("retain_relay_running") == 2)
    refused = both.relay.post("/v1/completions", TEXT)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    both.decoder.gate.set()
    for thread in threads:
        thread.join(10)
    assert both.relay.post("/v1/completions", TEXT).status_code == 200


def test_connections_are_used_again(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.relay.post("/v1/completions", TEXT)
    before = (both.prefill.connections, both.decode.connections)
    for _ in range(5):
        both.relay.post("/v1/completions", TEXT)
    assert (both.prefill.connections, both.decode.connections) == before


# death


@pytest.mark.parametrize("stream", [False, True])
def test_kill_9_of_the_prefill_server_costs_time_alone(process: Process, relay: Relay, stream: bool) -> None:
    prefill, decode = process("Prefill ", pace=30.0), process("Decode ")
    front = relay([f"http://127.0.0.1:{prefill.port}"], [f"http://127.0.0.1:{decode.port}"])
    threading.Timer(0.5, prefill.kill).start()
    began = time.monotonic()
    answer = front.post("/v1/completions", {**TEXT, "max_tokens": 7, "stream": stream})
    assert _text(answer) == "Decode "
    assert 0.4 < time.monotonic() - began < 5
    assert front.metric('retain_relay_prefill_failures_total{reason="broken"}') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_kill_9_of_the_decode_server_ends_in_an_error_or_in_anothers_answer(
    process: Process, relay: Relay, serve: Serve, stream: bool
) -> None:
    first, second = process("First ", pace=0.05), serve(ToyEngine("Second "))
    front = relay([], [f"http://127.0.0.1:{first.port}", second.url])
    threading.Timer(0.5, first.kill).start()
    began = time.monotonic()
    answer = front.post("/v1/completions", {**TEXT, "max_tokens": 200, "stream": stream})
    assert time.monotonic() - began < 5
    if stream:
        assert '"code":"decode_failed"' in answer.text.replace(" ", "")
    else:
        assert _text(answer) == "Second "
    # It may come back at the same address.
    back = process("Back ", port=first.port)
    assert eventually(lambda: front.get("/health").json()["status"] == "ok", 20)
    assert back.process.poll() is None


# starting


def test_urls_and_places_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--decode"):
        build_app(["http://127.0.0.1:1"], [], Limits())
    with pytest.raises(ConfigError, match="ftp://x"):
        build_app([], ["ftp://x"], Limits())
    with pytest.raises(ConfigError, match="--allow-open"):
        run_relay([], ["http://127.0.0.1:1"], "0.0.0.0", free_port())
