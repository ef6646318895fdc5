"""The protocol, seen from its clients: framing, errors, queueing, hang-ups. The engine is a toy, the rest is
real."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from retain.block import array_shapes, block_of, make_header
from retain.errors import UnsupportedInput
from retain.gateway.engine import Report
from retain.identity import chain, space_of
from tests.gateway.conftest import Serve, Served, eventually
from tests.gateway.toy import CONTEXT, ToyEngine

HI: Any = [{"role": "user", "content": "Hi there, how are you?"}]


@pytest.fixture(scope="module")
def idle(serve_module: Serve) -> tuple[Served, ToyEngine]:
    """A server that is asked only for what it refuses."""
    engine = ToyEngine()
    return serve_module(engine), engine


def chat(served: Served, **more: Any) -> httpx.Response:
    return served.post("/v1/chat/completions", {"model": "toy", "messages": HI, **more})


def completion(served: Served, **more: Any) -> httpx.Response:
    return served.post("/v1/completions", {"model": "toy", "prompt": "Hi", "max_tokens": 50, **more})


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    assert found["message"]
    assert found["type"]
    return found


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


# answers


def test_a_chat_answer_has_the_form_that_openai_clients_read(serve: Serve) -> None:
    engine = ToyEngine("Hello.")
    served = serve(engine)
    answer = served.openai().chat.completions.create(model="toy", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 5
    assert answer.model == "toy"
    assert answer.system_fingerprint == "fp_" + "76" * 8
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7, "six letters and the end of the text"
    assert answer.usage.prompt_tokens == len(engine.started[0][0])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.prompt_tokens_details.cache_write_tokens == 16
    extra = answer.model_extra or {}
    assert extra["retain"]["tokens"] == {"memory": 3, "disk": 2, "computed": 7}
    assert extra["retain"]["miss"]["reason"] == "nothing_kept"
    assert extra["retain"]["ttft_seconds"] > 0


def test_a_completion_has_its_own_form(serve: Serve) -> None:
    served = serve(ToyEngine("Hello."))
    answer = served.openai().completions.create(model="toy", prompt="Hi")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello."
    assert answer.choices[0].finish_reason == "stop"


def test_the_default_lengths_are_those_of_openai(serve: Serve) -> None:
    engine = ToyEngine("x" * 100)
    served = serve(engine)
    assert completion(served, max_tokens=None).json()["usage"]["completion_tokens"] == 16
    assert chat(served).json()["usage"]["completion_tokens"] == 101
    assert engine.started[1][1].max_tokens == CONTEXT - len(engine.started[1][0])


def test_an_answer_that_reaches_its_length_says_so(serve: Serve) -> None:
    served = serve(ToyEngine("Hello."))
    for name in ("max_tokens", "max_completion_tokens"):
        choice = chat(served, **{name: 3}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")


def test_sampling_reaches_the_engine_as_asked(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine)
    chat(served, temperature=0.3, top_p=0.5, seed=-7, max_tokens=4)
    chat(served)
    chat(served, top_p=0)
    first, second, third = (sampling for _, sampling, _ in engine.started)
    assert (first.temperature, first.top_p, first.seed, first.max_tokens) == (0.3, 0.5, -7, 4)
    assert (second.temperature, second.top_p, second.seed, second.top_logprobs) == (1.0, 1.0, None, None)
    assert third.temperature == 0.0, "no mass but the likeliest token's"


def test_token_ids_are_taken_as_they_are(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine)
    for prompt in ([72, 105], [[72, 105]], "Hi", ["Hi"]):
        assert completion(served, prompt=prompt).status_code == 200
    assert [tokens for tokens, _, _ in engine.started] == [[72, 105]] * 4


def test_streamed_pieces_join_to_the_whole_answer(serve: Serve) -> None:
    text = "Grüße, 世界! 👩‍👩‍👧 done"
    served = serve(ToyEngine(text))
    chunks = events(chat(served, stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas), "a character was split"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    assert chunks[-1]["retain"]["tokens"]["memory"] == 3

    chunks = events(completion(served, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(serve: Serve) -> None:
    served = serve(ToyEngine())
    stream = served.openai().chat.completions.create(
        model="toy", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 5
    assert "retain" in (chunks[-1].model_extra or {})


def test_bytes_that_are_no_text_become_replacement_characters_at_the_same_places_streamed_or_not(
    serve: Serve,
) -> None:
    served = serve(ToyEngine(b"a\xffb\xe2\x82"))
    assert completion(served).json()["choices"][0]["text"] == "a\ufffdb\ufffd"
    chunks = events(completion(served, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a\ufffdb\ufffd"


@pytest.mark.parametrize("stop", ["END", ["nothing", "END"], "👍END", ["ENDING", "END"]])
def test_a_stop_string_ends_the_answer_and_the_generation(serve: Serve, stop: str | list[str]) -> None:
    engine = ToyEngine("one 👍END two three")
    served = serve(engine)
    want = "one " if stop == "👍END" else "one 👍"
    choice = completion(served, stop=stop).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (want, "stop")
    assert engine.steps == len("one 👍END".encode())
    chunks = events(completion(served, stop=stop, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want


def test_log_probabilities_in_both_forms(serve: Serve) -> None:
    served = serve(ToyEngine("aé"))
    content = chat(served, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]] == [
        ("a", -0.5),
        ("A", -1.5),
    ]
    assert chat(served, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(served).json()["choices"][0]["logprobs"] is None

    told = completion(served, logprobs=1).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert told["token_logprobs"] == [-0.5] * 3
    assert told["top_logprobs"][0] == {"a": -0.5}
    assert told["text_offset"] == [0, 1, 1]


def test_streamed_log_probabilities_are_those_of_the_whole_and_none_is_shown_behind_a_stop_string(
    serve: Serve,
) -> None:
    served = serve(ToyEngine("aé END x"))
    whole = chat(served, logprobs=True, top_logprobs=1, stop=" END").json()["choices"][0]["logprobs"][
        "content"
    ]
    chunks = events(chat(served, logprobs=True, top_logprobs=1, stop=" END", stream=True))
    streamed = [
        entry
        for c in chunks
        if c["choices"][0]["logprobs"]
        for entry in c["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole
    assert len(whole) == 3


def test_tools_reach_the_template_and_calls_come_back(serve: Serve) -> None:
    engine = ToyEngine('Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    served = serve(engine)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    answer = served.openai().chat.completions.create(model="toy", messages=HI, tools=tools)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls: Any = answer.choices[0].message.tool_calls
    assert (calls[0].function.name, calls[0].function.arguments) == ("add", '{"a": 1}')
    assert answer.choices[0].message.content == "Sure."
    assert b'"name": "add"' in bytes(i for i in engine.started[0][0] if i < 256)

    names, arguments, ids, reason = [], "", set(), None
    for chunk in served.openai().chat.completions.create(model="toy", messages=HI, tools=tools, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            names.append(call.function.name)
            arguments += call.function.arguments or ""
            ids.add(call.id)
        reason = chunk.choices[0].finish_reason or reason
    assert (names, arguments, len(ids), reason) == (["add"], '{"a": 1}', 1, "tool_calls")

    plain = served.openai().chat.completions.create(model="toy", messages=HI, tools=tools, tool_choice="none")
    assert plain.choices[0].finish_reason == "stop"
    assert "<tool_call>" in (plain.choices[0].message.content or "")
    assert b'"name": "add"' not in bytes(i for i in engine.started[-1][0] if i < 256)


def test_fields_of_other_servers_are_ignored_and_named(serve: Serve) -> None:
    body = chat(serve(ToyEngine()), top_k=5, prompt_cache_key="x", user="u", metadata={"a": "b"}).json()
    assert body["retain"]["ignored_fields"] == ["top_k"]


# refusals


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model": "toy", "messages": [' + b"[" * 100_000, None),
        (b'{"model": "toy", "messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
        ({"messages": HI}, "model"),
        ({"model": "toy"}, "messages"),
        ({"model": 3, "messages": HI}, "model"),
        ({"model": "toy", "messages": []}, "messages"),
        ({"model": "toy", "messages": "hi"}, "messages"),
        ({"model": "toy", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": "toy", "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"model": "toy", "messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"model": "toy", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"model": "toy", "messages": HI, "n": 2}, "n"),
        ({"model": "toy", "messages": HI, "n": 0}, "n"),
        ({"model": "toy", "messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"model": "toy", "messages": HI, "max_tokens": -1}, "max_tokens"),
        ({"model": "toy", "messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"model": "toy", "messages": HI, "max_tokens": 1.5}, "max_tokens"),
        ({"model": "toy", "messages": HI, "max_tokens": 2**63}, "max_tokens"),
        ({"model": "toy", "messages": HI, "temperature": -0.1}, "temperature"),
        ({"model": "toy", "messages": HI, "temperature": 2.1}, "temperature"),
        ({"model": "toy", "messages": HI, "temperature": "hot"}, "temperature"),
        ({"model": "toy", "messages": HI, "top_p": 1.1}, "top_p"),
        ({"model": "toy", "messages": HI, "seed": 2**63}, "seed"),
        ({"model": "toy", "messages": HI, "stop": [""]}, "stop"),
        ({"model": "toy", "messages": HI, "stop": ["a"] * 17}, "stop"),
        ({"model": "toy", "messages": HI, "stream": "yes"}, "stream"),
        ({"model": "toy", "messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "toy", "messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"model": "toy", "messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"model": "toy", "messages": HI, "tools": [{"type": "web"}]}, "tools[0]"),
        ({"model": "toy", "messages": HI, "functions": [{}]}, "functions"),
        ({"model": "toy", "messages": HI, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"model": "toy", "messages": HI, "presence_penalty": 1}, "presence_penalty"),
        ({"model": "toy", "messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "toy", "messages": HI, "cache_salt": ""}, "cache_salt"),
        ({"model": "toy", "messages": HI, "fidelity": "good"}, "fidelity"),
    ],
)
def test_bad_chat_requests_are_refused_with_the_field_named(
    serve: Serve, body: object, param: str | None
) -> None:
    engine = ToyEngine()
    served = serve(engine)
    refused = error(served.post("/v1/chat/completions", body), 400)
    assert refused["type"] == "invalid_request_error"
    assert refused["param"] == param
    assert engine.started == []
    assert served.get("/health").status_code == 200, "the server goes on"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_bad_completion_requests_are_refused_with_the_field_named(
    idle: tuple[Served, ToyEngine], more: dict[str, Any], param: str
) -> None:
    assert error(completion(idle[0], **more), 400)["param"] == param


def test_a_context_that_is_exceeded_is_refused_with_the_numbers(serve: Serve) -> None:
    served = serve(ToyEngine())
    refused = error(completion(served, prompt=[65] * 4090, max_tokens=7), 400)
    assert refused["code"] == "context_length_exceeded"
    assert all(number in refused["message"] for number in ("4096", "4090", "4097"))
    assert completion(served, prompt=[65] * 4090, max_tokens=6).status_code == 200
    for prompt in ([65] * CONTEXT, "x" * CONTEXT, "x" * 1_000_000):
        refused = error(completion(served, prompt=prompt, max_tokens=1), 400)
        assert (refused["code"], str(CONTEXT) in refused["message"]) == ("context_length_exceeded", True)
    assert error(chat(served, messages=HI * 5000), 400)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai().completions.create(model="toy", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_body_beyond_all_measure_is_refused(serve: Serve) -> None:
    served = serve(ToyEngine())
    error(served.post("/v1/completions", b'{"model": "toy", "prompt": "' + b"x" * (17 << 20) + b'"}'), 413)

    def parts() -> Any:
        for _ in range(20):
            yield b" " * (1 << 20)

    response = httpx.post(
        f"{served.url}/v1/completions",
        content=parts(),
        headers={"Content-Type": "application/json"},
        timeout=30,
    )
    error(response, 413)
    assert completion(served).status_code == 200


def test_only_json_is_read(serve: Serve) -> None:
    served = serve(ToyEngine())
    response = httpx.post(f"{served.url}/v1/completions", content=b'{"model": "toy", "prompt": "x"}')
    error(response, 415)
    response = httpx.post(
        f"{served.url}/v1/cache/clear", content=b"{}", headers={"Content-Type": "text/plain"}
    )
    error(response, 415)


def test_another_model_and_another_path_are_not_found(serve: Serve) -> None:
    served = serve(ToyEngine())
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai().chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    assert error(served.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    error(served.get("/v1/nothing"), 404)
    error(served.get("/v1/completions"), 405)
    assert [model.id for model in served.openai().models.list()] == ["toy"]
    assert served.openai().models.retrieve("toy").owned_by == "retain"


def test_an_engine_that_cannot_serve_an_input_gives_400_and_one_that_fails_500_without_its_words(
    serve: Serve,
) -> None:
    engine = ToyEngine()
    served = serve(engine)
    engine.fails = UnsupportedInput("the prompt has odd positions")
    assert "odd positions" in error(chat(served), 400)["message"]
    engine.fails = RuntimeError("secret detail")
    assert "secret" not in error(chat(served), 500)["message"]
    failed = served.metric('retain_requests_total{finish="failed"}')
    text = chat(served, stream=True).text
    assert '"error"' in text
    assert "secret" not in text
    assert "[DONE]" not in text
    assert served.metric('retain_requests_total{finish="failed"}') == failed + 1
    engine.fails = None
    assert chat(served).status_code == 200


# tenants


def test_without_a_key_nothing_is_served_where_there_are_keys(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine, api_keys={"ann": "ann-secret", "bob": "bob-secret", "admin": "admin-secret"})
    body = {"model": "toy", "messages": HI}
    for key in (None, "wrong", "ann-secre", "ann-secret2"):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/cache/clear"):
            response = served.post(path, body, key)
            assert error(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/cache/stats", "/metrics"):
            error(served.get(path, key), 401)
    assert engine.started == []
    assert served.get("/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        served.openai("wrong").models.list()
    assert served.openai("ann-secret").models.list().data[0].id == "toy"


def test_each_key_and_each_cache_salt_has_a_space_of_its_own(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine, api_keys={"ann": "ann-secret", "bob": "bob-secret"})
    for key in ("ann-secret", "bob-secret"):
        for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
            response = served.post("/v1/chat/completions", {"model": "toy", "messages": HI, **salt}, key)
            assert response.status_code == 200
    spaces = [space for _, _, space in engine.started]
    assert len(set(spaces)) == 6
    open_engine = ToyEngine()
    opened = serve(open_engine)
    chat(opened)
    chat(opened, cache_salt="x")
    assert open_engine.started[0][2] == space_of(open_engine.spec.kin)
    assert open_engine.started[1][2] not in (open_engine.started[0][2], *spaces)


def test_only_the_operator_sees_the_whole_and_clears_everything(serve: Serve) -> None:
    served = serve(ToyEngine(), api_keys={"ann": "ann-secret", "admin": "admin-secret"})
    error(served.post("/v1/cache/clear", {"all": True}, "ann-secret"), 403)
    error(served.get("/metrics", "ann-secret"), 403)
    served.post("/v1/chat/completions", {"model": "toy", "messages": HI}, "ann-secret")
    mine = served.get("/v1/cache/stats", "ann-secret").json()
    assert mine["tenant"] == "ann"
    assert "cache" not in mine
    assert mine["totals"]["requests"] == 1
    assert mine["totals"]["memory_tokens"] == 3
    all_of_it = served.get("/v1/cache/stats", "admin-secret").json()
    assert all_of_it["totals"] == {}
    assert all_of_it["cache"]["tiers"]["memory"]["objects"] == 0
    assert served.post("/v1/cache/clear", {"all": True}, "admin-secret").json()["objects"] == 0
    assert served.get("/metrics", "admin-secret").status_code == 200


def test_clear_refuses_what_it_does_not_know(serve: Serve) -> None:
    served = serve(ToyEngine())
    assert error(served.post("/v1/cache/clear", {"tiers": "memory"}), 400)["param"] == "tiers"
    assert error(served.post("/v1/cache/clear", {"tier": "tape"}), 400)["param"] == "tier"
    assert error(served.post("/v1/cache/clear", {"all": "yes"}), 400)["param"] == "all"
    error(served.post("/v1/cache/clear", b"[]"), 400)
    assert served.post("/v1/cache/clear", b"").json() == {
        "cleared": "space",
        "tier": None,
        "objects": 0,
        "bytes": 0,
    }


# queue and hang-ups


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def queue_of(served: Served) -> tuple[int, int]:
    queue = served.get("/health").json()["queue"]
    return queue["running"], queue["waiting"]


def test_requests_wait_in_order_and_a_full_queue_says_when_to_come_back(serve: Serve) -> None:
    engine = ToyEngine()
    engine.gate.clear()
    served = serve(engine, max_queue=2)
    waiting = []
    for number in range(3):
        waiting.append(in_background(lambda n=number: completion(served, prompt=[n])))  # type: ignore[misc]
        assert eventually(lambda n=number: queue_of(served) == (1, n))  # type: ignore[misc]
    response = completion(served)
    assert error(response, 503)["code"] == "unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert served.metric("retain_queue_refused_total") == 1
    assert served.metric("retain_queue_waiting") == 2
    assert served.get("/health").status_code == 200, "health answers while a generation runs"
    engine.gate.set()
    for thread, results in waiting:
        thread.join(10)
        assert results[0].status_code == 200
    assert [tokens for tokens, _, _ in engine.started] == [[0], [1], [2]]
    assert queue_of(served) == (0, 0)


def hang_up_after_sending(served: Served, body: dict[str, Any], wait: Callable[[], bool]) -> None:
    host, _, port = served.url.removeprefix("http://").partition(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        assert eventually(wait)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_generation(serve: Serve, stream: bool) -> None:
    engine = ToyEngine("x" * 4000, pace=0.005)
    served = serve(engine)
    hang_up_after_sending(
        served, {"model": "toy", "messages": HI, "stream": stream}, lambda: engine.steps > 3
    )
    assert eventually(lambda: engine.ended == 1, 10)
    assert engine.steps < 1000
    assert eventually(lambda: served.metric('retain_requests_total{finish="cancelled"}') == 1)
    assert queue_of(served) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_queue_leaves_it(serve: Serve, stream: bool) -> None:
    engine = ToyEngine()
    engine.gate.clear()
    served = serve(engine)
    thread, results = in_background(lambda: completion(served))
    assert eventually(lambda: queue_of(served) == (1, 0))
    hang_up_after_sending(
        served, {"model": "toy", "messages": HI, "stream": stream}, lambda: queue_of(served) == (1, 1)
    )
    assert eventually(lambda: queue_of(served) == (1, 0)), "it gave its place back while the other still runs"
    engine.gate.set()
    thread.join(10)
    assert results[0].status_code == 200
    assert len(engine.started) == 1
    assert served.metric('retain_requests_total{finish="cancelled"}') == 1


def test_a_stream_comes_piece_by_piece(serve: Serve) -> None:
    engine = ToyEngine("abc")
    served = serve(engine)
    engine.gate.clear()
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json={"model": "toy", "prompt": "x", "stream": True}
    ) as response:
        assert response.status_code == 200, "the answer begins before its first token is there"
        engine.gate.set()
        assert "abc" in "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in response.iter_lines()
            if line.startswith("data: {")
        )


# counters


def test_a13_a_negative_count_disturbs_no_request_and_lowers_no_counter(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine)
    chat(served)
    before = served.get("/metrics").text
    engine.report = Report(
        tokens_by_tier={"memory": -40}, found=5, computed=-3, written=-1, saved_seconds=-2.0
    )
    text = chat(served, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    for source, value in (("memory", 3), ("disk", 2), ("computed", 7)):
        name = f'retain_prompt_tokens_total{{source="{source}"}}'
        assert f"{name} {value}.0" in before
        assert served.metric(name) == value


def test_a13_statistics_that_fail_disturb_no_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(ToyEngine())

    def broken() -> None:
        raise RuntimeError("no statistics today")

    monkeypatch.setattr(served.cache, "stats", broken)
    monkeypatch.setattr(served.cache, "nearest", lambda chain: broken())
    assert chat(served).json()["choices"][0]["message"]["content"] == "Hello."
    assert served.get("/health").json()["tiers"] is None
    assert served.get("/metrics").status_code == 200
    assert served.metric("retain_stats_errors_total") >= 1


def test_a14_each_counter_of_the_server_moves_by_what_happened_and_not_otherwise(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine)

    def values() -> dict[str, float]:
        lines = served.get("/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {
            n: float(v)
            for n, _, v in pairs
            if n.partition("{")[0].endswith(("_total", "_count")) and "/metrics" not in n
        }

    def moved(before: dict[str, float]) -> dict[str, float]:
        now = values()
        return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}

    before = values()
    assert moved(before) == {}, "looking moves nothing"
    chat(served)
    assert moved(before) == {
        'retain_requests_total{finish="stop"}': 1,
        'retain_prompt_tokens_total{source="memory"}': 3,
        'retain_prompt_tokens_total{source="disk"}': 2,
        'retain_prompt_tokens_total{source="computed"}': 7,
        "retain_generated_tokens_total": 7,
        "retain_cache_write_tokens_total": 16,
        'retain_misses_total{reason="nothing_kept"}': 1,
        'retain_ttft_seconds_count{reused="yes"}': 1,
        "retain_queue_seconds_count": 1,
        'retain_http_responses_total{path="/v1/chat/completions",status="200"}': 1,
    }
    before = values()
    engine.report = Report(computed=10)
    completion(served, max_tokens=2, prompt="x")
    assert moved(before) == {
        'retain_requests_total{finish="length"}': 1,
        'retain_prompt_tokens_total{source="computed"}': 10,
        "retain_generated_tokens_total": 2,
        'retain_ttft_seconds_count{reused="no"}': 1,
        "retain_queue_seconds_count": 1,
        'retain_http_responses_total{path="/v1/completions",status="200"}': 1,
    }, "a prompt of one token can miss nothing"
    before = values()
    completion(served, n=2)
    assert moved(before) == {'retain_http_responses_total{path="/v1/completions",status="400"}': 1}
    before = values()
    engine.report = Report(computed=1, saved_seconds=1.5, found=9, tokens_by_tier={"memory": 9})
    chat(served, max_tokens=1)
    assert moved(before)["retain_saved_seconds_total"] == 1.5


def test_metrics_follow_the_conventions_of_prometheus(serve: Serve) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    served = serve(ToyEngine())
    chat(served)
    families = {family.name: family for family in text_string_to_metric_families(served.get("/metrics").text)}
    assert all(name.startswith("retain_") for name in families)
    assert all(family.documentation for family in families.values())
    assert families["retain_cache_lookups"].type == "counter"
    assert families["retain_tier_resident_bytes"].type == "gauge"
    assert families["retain_ttft_seconds"].type == "histogram"


def test_a26_kv_of_another_variant_of_the_model_is_named_as_that(serve: Serve) -> None:
    engine = ToyEngine()
    served = serve(engine)
    prompt = [65] * 300
    request = chain(space_of(engine.spec.kin), prompt)
    other = replace(engine.spec, variant=b"w" * 32)
    header = make_header(other, space=request.space, parent=request.root, tokens=request.block(0), first=0)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in array_shapes(header).items()}
    assert served.cache.store(block_of(header, request.block(0), arrays)).kept
    engine.report = Report(computed=300)
    miss = completion(served, prompt=prompt).json()["retain"]["miss"]
    assert miss["reason"] == "other_variant"
    assert "256 tokens" in miss["words"]
    salted = completion(served, prompt=prompt, cache_salt="x").json()["retain"]["miss"]
    assert salted["reason"] == "nothing_kept", "another space is never looked into"
    engine.report = Report(computed=300, found=256)
    assert completion(served, prompt=prompt).json()["retain"]["miss"]["reason"] == "not_loaded"
