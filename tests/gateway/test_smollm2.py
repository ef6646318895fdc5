"""The server end to end: a real model in a process of its own, asked through the official client."""

from __future__ import annotations

import heapq
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import Served, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KEYS = ("ann=ann-secret", "bob=bob-secret", "admin=admin-secret")
START = """
import sys
from pathlib import Path
from retain.gateway import run_server
sys.exit(run_server("smollm2", ["memory:512MiB", "disk:" + sys.argv[1]], port=int(sys.argv[2]), grace=1.0,
                    api_keys=sys.argv[3:]))
"""
DOCUMENT = ((inspect.getdoc(heapq) or "")[:200] + inspect.getsource(heapq.merge))[:720]
"""Some 250 tokens: with a question, more than one block."""


@dataclass
class Process:
    """The server's process; `served` talks to it."""

    folder: Path
    served: Served
    running: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.served.url = f"http://127.0.0.1:{port}"
        with (self.folder / "log").open("ab") as log:
            self.running = subprocess.Popen(
                [sys.executable, "-c", START, str(self.folder / "kv"), str(port), *KEYS],
                stdout=log,
                stderr=log,
                # One thread: two would wait for each other whenever something else runs on this machine.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

        def state() -> str:
            assert self.running is not None
            assert self.running.poll() is None, self.log
            try:
                status: str = self.served.get("/health").json()["status"]
            except httpx.TransportError:
                return "closed"
            return status

        assert eventually(lambda: state() == "ok", 120), self.log

    def stop(self) -> int:
        """End it as a service manager does; the exit code."""
        assert self.running is not None
        self.running.send_signal(signal.SIGTERM)
        try:
            return self.running.wait(60)
        finally:
            self.running.kill()
            self.running.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("server"), Served("", None))  # type: ignore[arg-type]
    process.start()
    yield process
    if process.running is not None and process.running.poll() is None:
        assert process.stop() == 0


@dataclass
class Answer:
    """What the tests look at of an answer."""

    text: str
    finish: str | None
    prompt: int
    cached: int
    written: int
    retain: dict[str, Any]


def ask(
    server: Process, messages: Any, *, key: str = "ann-secret", stream: bool = False, **more: Any
) -> Answer:
    """One greedy chat answer through the official client."""
    client = server.served.openai(key).with_options(timeout=200)
    options = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 8, **more}
    if not stream:
        whole = client.chat.completions.create(**options)
        text, finish, last = (
            whole.choices[0].message.content or "",
            str(whole.choices[0].finish_reason),
            whole,
        )
        usage = whole.usage
    else:
        text, finish, last, usage = "", "", None, None
        for chunk in client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            last, usage = chunk, chunk.usage
    assert usage is not None
    details: Any = usage.prompt_tokens_details
    assert last is not None
    extra: Any = last.model_extra
    retain = extra["retain"]
    tokens = retain["tokens"]
    assert details.cached_tokens == tokens["memory"] + tokens["disk"]
    assert usage.prompt_tokens == details.cached_tokens + tokens["computed"]
    return Answer(
        text, finish, usage.prompt_tokens, details.cached_tokens, details.cache_write_tokens, retain
    )


def kept_of(answer: Answer, generated: int = 8) -> int:
    """How much of a prompt hits once it was answered.

    Kept are steps of 16 tokens of what was computed, the answer but for its last token included. The prompt's
    last token is always computed again.
    """
    return min(answer.prompt - 1, (answer.prompt + generated - 1) // 16 * 16)


def about(subject: str, question: str = "What is this?") -> Any:
    """A chat about the document, which is another one for every subject."""
    return [
        {"role": "system", "content": f"You know all about {subject}.\n{DOCUMENT}"},
        {"role": "user", "content": question},
    ]


def test_a20_answers_are_equal_cold_warm_streamed_and_after_a_restart_and_no_tenant_hits_anothers(
    server: Process,
) -> None:
    """Cold, warm, restart; and A20: what one tenant's key keeps is never another's hit, in any tier."""
    cold = ask(server, about("heaps"))
    assert (cold.cached, cold.retain["miss"]["reason"]) == (0, "nothing_kept")
    assert cold.written >= cold.prompt // 16 * 16
    assert cold.finish == "length"
    warm = ask(server, about("heaps"))
    streamed = ask(server, about("heaps"), stream=True)
    assert warm.text == streamed.text == cold.text
    assert warm.cached == streamed.cached == kept_of(cold)
    assert warm.retain["tokens"]["memory"] == warm.cached
    assert warm.retain["miss"] is None
    assert warm.retain["saved_seconds"] > 0
    other = ask(server, about("heaps", "Who wrote it?"))
    assert other.cached > cold.prompt - 20

    bob = ask(server, about("heaps"), key="bob-secret")
    assert (bob.text, bob.cached) == (cold.text, 0)
    assert bob.retain["miss"]["reason"] == "nothing_kept", "an explanation stays in its space"
    salted = ask(server, about("heaps"), extra_body={"cache_salt": "private"})
    assert (salted.text, salted.cached, salted.retain["miss"]["reason"]) == (cold.text, 0, "nothing_kept")

    assert server.served.post("/v1/cache/clear", {}, "bob-secret").json()["objects"] > 0
    assert server.stop() == 0
    server.start()

    bob = ask(server, about("heaps"), key="bob-secret", max_tokens=1)
    assert (bob.cached, bob.retain["miss"]["reason"]) == (0, "nothing_kept")
    again = ask(server, about("heaps"))
    assert again.text == cold.text
    assert again.retain["tokens"]["disk"] == again.cached == kept_of(cold)
    once_more = ask(server, about("heaps"))
    assert once_more.retain["tokens"]["memory"] == kept_of(cold), "what was read lies in memory now"
    assert once_more.text == cold.text


def test_completions_take_text_and_token_ids_alike(server: Process) -> None:
    client = server.served.openai("ann-secret")
    text = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=5
    )
    ids = [504, 3575, 282, 4649, 314]
    as_ids = client.completions.create(model="smollm2", prompt=ids, temperature=0, max_tokens=5, logprobs=2)
    assert text.choices[0].text == as_ids.choices[0].text
    assert text.choices[0].text.startswith(" Paris.")
    logprobs: Any = as_ids.choices[0].logprobs
    assert "".join(logprobs.tokens) == as_ids.choices[0].text
    assert all(
        max(top.values()) == chosen
        for top, chosen in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    cut = client.completions.create(model="smollm2", prompt=ids, temperature=0, max_tokens=5, stop=["ris."])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (" Pa", "stop")


def test_a_seed_makes_a_drawn_answer_come_again(server: Process) -> None:
    drawn = [ask(server, about("luck"), temperature=1.5, seed=seed, max_tokens=12).text for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


def metrics(server: Process) -> dict[str, float]:
    lines = server.served.get("/metrics", "admin-secret").text.splitlines()
    return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_a12_hit_and_requested_tokens_are_those_of_the_requests(server: Process) -> None:
    before = metrics(server)
    answers = [
        ask(server, about("apples"), max_tokens=2),
        ask(server, about("apples"), max_tokens=2),
        ask(server, about("apples", "Why?"), max_tokens=2),
        ask(server, about("pears"), max_tokens=2),
    ]
    after = metrics(server)

    def moved(name: str) -> float:
        return after[name] - before[name]

    assert moved("retain_cache_requested_tokens_total") == sum(answer.prompt - 1 for answer in answers)
    assert moved("retain_cache_hit_tokens_total") == sum(answer.cached for answer in answers)
    assert moved('retain_prompt_tokens_total{source="memory"}') == sum(answer.cached for answer in answers)
    assert moved('retain_prompt_tokens_total{source="computed"}') == sum(a.prompt - a.cached for a in answers)
    assert moved("retain_cache_write_tokens_total") == sum(
        answer.retain["written_tokens"] for answer in answers
    )
    assert moved("retain_cache_lookups_total") == 4
    assert moved("retain_cache_lookup_hits_total") + moved("retain_cache_lookup_misses_total") == 4
    # Pears share the first words with apples, and the template's head.
    assert answers[3].cached < 64


def test_a14_objects_stored_less_evicted_less_dropped_are_those_that_are_there(server: Process) -> None:
    ask(server, about("sums"), max_tokens=2)
    assert eventually(lambda: metrics(server)["retain_cache_pending_writes"] == 0, 20)
    now = metrics(server)
    resident = now['retain_tier_objects{tier="memory"}'] + now['retain_tier_objects{tier="disk"}']
    came = (
        now["retain_cache_stored_blocks_total"]
        + now["retain_cache_written_objects_total"]
        + now["retain_cache_adopted_objects_total"]
        + now["retain_cache_promoted_blocks_total"]
    )
    assert (
        came - now["retain_cache_evicted_objects_total"] - now["retain_cache_dropped_objects_total"]
        == resident
    )


def test_a26_a_volatile_head_is_named_with_its_token_and_its_text_on_both_sides(server: Process) -> None:
    def agent(head: str, question: str = "Go on.") -> Any:
        return [{"role": "system", "content": f"{head}\n{DOCUMENT}"}, {"role": "user", "content": question}]

    ask(server, agent("x-billing-header: cch=f3a91;"), max_tokens=1)
    answer = ask(server, agent("x-billing-header: cch=07b2e;"), max_tokens=1)
    miss = answer.retain["miss"]
    assert miss["reason"] == "nonce"
    assert "07b2e" in miss["words"]
    assert "f3a91" in miss["words"]
    assert "07b2e" in miss["text"]
    assert "f3a91" in miss["kept_text"]
    assert (miss["token"], miss["kept_token"]) == ("0", "f")
    assert miss["where"] == "system prompt"
    assert answer.cached in (0, miss["index"])

    ask(server, agent("Current time: 2026-12-01T08:00:01Z. Be brief."), max_tokens=1)
    miss = ask(server, agent("Current time: 2026-12-01T08:00:42Z. Be brief."), max_tokens=1).retain["miss"]
    assert miss["reason"] == "timestamp"
    assert "2026-12-01T08:00:42Z" in miss["words"]


def test_a26_tools_and_json_keys_in_another_order_are_named(server: Process) -> None:
    def tool(name: str, **more: Any) -> Any:
        return {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool to {name} things.",
                "parameters": {"type": "object", **more},
            },
        }

    tools = [tool("search"), tool("write"), tool("read")]
    chat: Any = [{"role": "user", "content": "Find it."}]
    ask(server, chat, tools=tools, max_tokens=1)
    same = ask(server, chat, tools=tools, max_tokens=1)
    assert same.cached >= same.prompt - 16, "what was computed is kept in steps of 16 tokens"
    miss = ask(server, chat, tools=[tools[1], tools[0], tools[2]], max_tokens=1).retain["miss"]
    assert miss["reason"] == "reordered_tools"
    assert "'write'" in miss["words"]
    assert "'search'" in miss["words"]
    assert miss["where"] == "tools"

    turned: Any = [
        {"function": dict(reversed(tool["function"].items())), "type": "function"} for tool in tools
    ]
    miss = ask(server, chat, tools=turned, max_tokens=1).retain["miss"]
    assert miss["reason"] == "reordered_keys"


def test_a27_an_answer_rendered_otherwise_is_used_up_to_its_first_difference(server: Process) -> None:
    first = about("turns", "Name three fruits.")
    given = ask(server, first, max_tokens=40)
    faithful = [
        *first,
        {"role": "assistant", "content": given.text},
        {"role": "user", "content": "And more?"},
    ]
    changed = [
        *first,
        {"role": "assistant", "content": "Well. " + given.text},
        {"role": "user", "content": "And more?"},
    ]
    wrong = ask(server, changed, max_tokens=1)
    miss = wrong.retain["miss"]
    assert miss["reason"] == "changed_answer"
    assert miss["where"] == "assistant message 1"
    assert miss["index"] == wrong.cached == given.prompt, "never beyond the first difference"
    assert wrong.retain["lost_tokens"] > 5
    right = ask(server, faithful, max_tokens=1)
    assert right.cached > given.prompt + 5, "the generated tokens hit"
    assert right.retain["lost_tokens"] == 0


def test_a30_clear_says_what_it_removed_and_nothing_hits_afterwards_in_any_tier(server: Process) -> None:
    for key in ("ann-secret", "bob-secret"):
        ask(server, about("clearing"), key=key, max_tokens=1)
    assert eventually(lambda: metrics(server)["retain_cache_pending_writes"] == 0, 20)
    before = metrics(server)
    removed = server.served.post("/v1/cache/clear", {}, "ann-secret").json()
    after = metrics(server)

    def fell(name: str) -> float:
        return sum(
            before[f'{name}{{tier="{tier}"}}'] - after[f'{name}{{tier="{tier}"}}']
            for tier in ("memory", "disk")
        )

    assert removed["cleared"] == "space"
    assert removed["objects"] == fell("retain_tier_objects") > 2
    assert removed["bytes"] == fell("retain_tier_resident_bytes") > 0
    cleared = ask(server, about("clearing"), max_tokens=1)
    assert (cleared.cached, cleared.retain["miss"]["reason"]) == (0, "nothing_kept")
    assert ask(server, about("clearing"), key="bob-secret", max_tokens=1).cached > 0, "another tenant's stays"

    refused = server.served.post("/v1/cache/clear", {"all": True}, "bob-secret")
    assert refused.status_code == 403
    everything = server.served.post("/v1/cache/clear", {"all": True}, "admin-secret").json()
    assert everything["objects"] > 0
    assert [
        path for path in (server.folder / "kv").rglob("*") if path.is_file() and path.stat().st_size > 100_000
    ] == []
    assert ask(server, about("clearing"), key="bob-secret", max_tokens=1).cached == 0
    assert server.served.post("/v1/cache/clear", {"tier": "disk"}, "admin-secret").json()["objects"] == 0


def test_a_client_that_hangs_up_ends_its_generation(server: Process) -> None:
    before = metrics(server)
    client = server.served.openai("ann-secret")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=about("patience", "Write a long story."),
        max_tokens=2000,
        temperature=0,
        stream=True,
    )
    next(iter(stream))
    assert server.served.get("/health").json()["queue"]["running"] == 1
    stream.close()
    assert eventually(lambda: server.served.get("/health").json()["queue"]["running"] == 0, 10)
    ended = metrics(server)
    name = 'retain_requests_total{finish="cancelled"}'
    assert ended[name] == before[name] + 1
    assert ended["retain_generated_tokens_total"] - before["retain_generated_tokens_total"] < 500


def test_a_client_that_gives_up_during_a_long_prefill_ends_it(server: Process) -> None:
    before = metrics(server)
    client = server.served.openai("ann-secret").with_options(timeout=1.5)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model="smollm2", messages=about("waiting", "word " * 6000), max_tokens=1
        )
    assert eventually(lambda: server.served.get("/health").json()["queue"]["running"] == 0, 10)
    after = metrics(server)
    name = 'retain_requests_total{finish="cancelled"}'
    assert after[name] == before[name] + 1
    for name in ("retain_generated_tokens_total", 'retain_prompt_tokens_total{source="computed"}'):
        assert after[name] == before[name]


def test_eight_clients_at_once_get_what_each_would_get_alone_and_health_answers_meanwhile(
    server: Process,
) -> None:
    questions = [f"What about item {number}?" for number in range(8)]
    with ThreadPoolExecutor(9) as clients:
        together = [
            clients.submit(ask, server, about("crowds", question), max_tokens=3) for question in questions
        ]
        slowest = 0.0
        while not all(answer.done() for answer in together):
            asked = time.monotonic()
            assert server.served.get("/health").json()["status"] == "ok"
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.05)
    assert slowest < 5
    alone = [ask(server, about("crowds", question), max_tokens=3) for question in questions]
    assert [answer.result().text for answer in together] == [answer.text for answer in alone]
    assert sum(answer.result().cached == 0 for answer in together) <= 1, "the document was computed once"


def test_a13_a_load_that_fails_after_its_lookup_does_not_disturb_the_stream_and_no_counter_falls(
    server: Process,
) -> None:
    messages = about("damage")
    cold = ask(server, messages)
    assert server.stop() == 0
    for path in (server.folder / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            with path.open("r+b") as file:
                file.seek(-5000, 2)
                file.write(b"\xa5" * 4000)
    server.start()
    before = metrics(server)
    answer = ask(server, messages, stream=True)
    assert answer.text == cold.text
    assert answer.cached == 0
    after = metrics(server)
    assert all(
        after[name] >= value for name, value in before.items() if name.partition("{")[0].endswith("_total")
    )
    failures = [
        name
        for name in after
        if name.startswith("retain_cache_failures_total") and after[name] > before.get(name, 0)
    ]
    assert failures, "the failed load is counted"
    again = ask(server, messages)
    assert (again.text, again.cached) == (cold.text, kept_of(cold)), "the damaged objects were replaced"


def test_the_log_tells_of_each_request_and_holds_none_of_its_text(server: Process) -> None:
    ask(server, [{"role": "user", "content": "A zanzibar riddle, please."}])
    server.served.post(
        "/v1/chat/completions", {"model": "smollm2", "messages": [{"role": "zanzibar"}]}, "ann-secret"
    )
    line = r"chat/completions by ann: prompt \d+ tokens \(.*computed \d+, kept \d+\), answer 8 tokens, length"
    assert re.search(line, server.log)
    for text in ("zanzibar", "heap", "secret"):
        assert text not in server.log


def test_a_server_that_is_stopped_ends_what_runs_within_its_grace_and_exits_with_0(server: Process) -> None:
    client = server.served.openai("ann-secret")
    seen: list[str] = []

    def read() -> None:
        stream = client.chat.completions.create(
            model="smollm2",
            messages=about("the end", "Tell a story."),
            max_tokens=3000,
            temperature=0,
            stream=True,
        )
        try:
            seen.extend(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        except openai.APIError as error:
            seen.append(f"error: {error.message}")

    reader = threading.Thread(target=read)
    reader.start()
    assert eventually(
        lambda: len(seen) >= 0 and server.served.get("/health").json()["queue"]["running"] == 1, 60
    )
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 30
    reader.join(10)
    assert not reader.is_alive()
    assert seen[-1] == "error: The server is stopping."
    objects = [path for path in (server.folder / "kv").rglob("*") if path.is_file()]
    assert not any(path.parent.name == ".writing" for path in objects), json.dumps(
        [str(path) for path in objects]
    )
    assert "stopped" in server.log
