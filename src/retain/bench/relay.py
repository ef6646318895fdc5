"""Bench relay: time to the first token through the relay, beside each of its servers alone.

Servers of different makes take each other's KV after a handshake, which is made first.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from retain.bench.gguf_files import float_gguf
from retain.bench.handshake import HandshakeError, Side, shake, surroundings
from retain.bench.probe import probe_tokens
from retain.bench.progress import Steps
from retain.bench.report import Report, Value
from retain.bench.server import OwnDaemons, ServerProcess
from retain.bench.services import free_port, running
from retain.bench.texts import long_prompt
from retain.bench.vllm_server import VllmServer
from retain.bench.vllm_trial import engine_python
from retain.errors import ConfigError
from retain.models import find

MODEL = "smollm2"
NAME = "model"
TIER = "memory:2GiB"
ANSWER_TOKENS = 16
ROUNDS = 3
ENGINES = ("vllm", "transformers", "llamacpp")
SHARED_CORES = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
"""Both engines compute on the same cores here: threads that wait by spinning would hold up the other's."""

EXACT: Mapping[str, Any] = {"dtype": "float32", "flash": False}
"""llama.cpp as it computes what the others do."""
SILENCE_SECONDS = 300.0

Server = VllmServer | ServerProcess


def run(tokens: int, prefill: str, decode: str) -> Report:
    """Measure with SmolLM2 in float32, for prompts of `tokens` tokens, a quarter and a sixteenth of them.

    `prefill` and `decode` are of ENGINES. Raises ConfigError, and HandshakeError where they cannot share.
    """
    for engine in (prefill, decode):
        if engine not in ENGINES:
            raise ConfigError(f"no engine {engine!r} is measured; known are {' and '.join(ENGINES)}")
    from retain.engines.transformers.loading import load_tokenizer

    lengths = (tokens // 16, tokens // 4, tokens)
    prompt = long_prompt(load_tokenizer(MODEL).encode, tokens)
    with (
        Steps("relay", 2 + len(lengths) * (ROUNDS + 1)) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
        surroundings({"XDG_STATE_HOME": folder, **SHARED_CORES}),
        ExitStack() as stack,
    ):
        if prefill != decode:
            _handshake(prefill, decode)
        steps.step("handshake")
        three = stack.enter_context(_three(Path(folder), prefill, decode))
        bench = _Bench(three, steps)
        rows = [bench.row(prompt[:length]) for length in lengths]
    ratios = {
        "relay.ttft_over_prefill": float(rows[-1]["ttft_seconds"] or 0)
        / float(rows[-1]["prefill_seconds"] or 1),
        "relay.hand_over_seconds": float(rows[-1]["ttft_seconds"] or 0)
        - float(rows[-1]["prefill_seconds"] or 0),
    }
    checks = {
        "text_equal": all(bool(row["text_equal"]) for row in rows),
        "prompts_arrive": all(int(row["computed_tokens"] or 0) <= 16 for row in rows),
    }
    return Report(f"relay {prefill} to {decode}", rows, ratios, checks)


def _handshake(prefill: str, decode: str) -> None:
    sides = [_side(engine) for engine in (prefill, decode)]
    for verdict in shake(sides, probe_tokens(find(MODEL))):
        if not verdict.passed:
            raise HandshakeError(
                f"{verdict.reader.engine} may not take the KV of {verdict.writer.engine}: {verdict.reason}"
            )


def _side(engine: str) -> Side:
    if engine == "vllm":
        return Side("vllm", MODEL, engine_python())
    if engine == "llamacpp":
        return Side("llamacpp", str(float_gguf(find(MODEL)).path), options=EXACT)
    return Side("transformers", MODEL)


@dataclass(frozen=True)
class _Three:
    """The servers, and the URL of the relay before them."""

    prefill: Server
    decode: Server
    relay: str


@contextmanager
def _three(folder: Path, prefill: str, decode: str) -> Iterator[_Three]:
    with ExitStack() as stack:
        daemons = stack.enter_context(OwnDaemons())
        first = _server(prefill, "kv_producer", folder / "prefill", daemons, stack)
        second = _server(decode, "kv_consumer", folder / "decode", daemons, stack)
        for server in (first, second):
            if isinstance(server, VllmServer):
                server.wait()
        port = free_port()
        command = [sys.executable, "-m", "retain.cli", "relay", "--port", str(port), "--min-prompt", "0"]
        command += ["--prefill", first.url, "--decode", second.url]
        stack.enter_context(running(command, port, folder / "relay.log"))
        yield _Three(first, second, f"http://127.0.0.1:{port}")


def _server(engine: str, role: str, folder: Path, daemons: OwnDaemons, stack: ExitStack) -> Server:
    folder.mkdir()
    if engine != "vllm":
        model, more = MODEL, []
        if engine == "llamacpp":
            model = str(float_gguf(find(MODEL)).path)
            more = ["--engine", engine, "--dtype", str(EXACT["dtype"]), "--no-flash"]
        options = ["--tier", TIER, "--name", NAME, *more]
        return stack.enter_context(ServerProcess(model, options, folder, daemons))
    from retain.engines.transformers.loading import prepared

    options = [
        "--max-model-len",
        "8192",
        "--kv-cache-memory-bytes",
        "800000000",
        "--no-enable-prefix-caching",
    ]
    settings = {"tiers": ["daemon", TIER]}
    return stack.enter_context(
        VllmServer(prepared(MODEL), folder, role, settings, options, daemons.environment, name=NAME)
    )


class _Bench:
    def __init__(self, three: _Three, steps: Steps) -> None:
        self._three = three
        self._steps = steps
        self._salts = map(str, itertools.count())
        for url in (three.prefill.url, three.decode.url, three.relay):
            _first_token(url, self._asked([7] * 300))
        steps.step("servers")

    def row(self, prompt: Sequence[int]) -> dict[str, Value]:
        """One length of prompt. A salt of its own makes each request new to the caches."""
        three = self._three
        what = f"{len(prompt)} tokens"
        seconds: dict[str, list[float]] = {"prefill": [], "relay": [], "decode": []}
        for _ in range(ROUNDS):
            seconds["prefill"].append(
                _first_token(three.prefill.url, {**self._asked(prompt), "max_tokens": 1})
            )
            seconds["relay"].append(_first_token(three.relay, self._asked(prompt)))
            seconds["decode"].append(_first_token(three.decode.url, self._asked(prompt)))
            self._steps.step(what)
        alone = _whole(three.decode.url, self._asked(prompt))
        before = _handed(three.decode)
        relayed = _whole(three.relay, self._asked(prompt))
        self._steps.step(what)
        if isinstance(three.decode, VllmServer):
            computed = len(prompt) - int(_handed(three.decode) - before)
        else:
            computed = relayed["retain"]["tokens"]["computed"]
        return {
            "prompt_tokens": len(prompt),
            "prefill_seconds": median(seconds["prefill"]),
            "ttft_seconds": median(seconds["relay"]),
            "decode_alone_seconds": median(seconds["decode"]),
            "computed_tokens": computed,
            "text_equal": relayed["choices"][0]["text"] == alone["choices"][0]["text"],
        }

    def _asked(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "cache_salt": next(self._salts),
        }


def _handed(server: Server) -> float:
    return server.metric("vllm:external_prefix_cache_hits_total") if isinstance(server, VllmServer) else 0.0


def _first_token(url: str, asked: dict[str, Any]) -> float:
    """Seconds to the first token of a streamed answer."""
    began = time.perf_counter()
    with _posted(url, {**asked, "stream": True}) as answer:
        while line := answer.readline():
            if line.startswith(b"data: {"):
                seconds = time.perf_counter() - began
                answer.read()
                return seconds
    raise AssertionError(f"{url} answered without a token")


def _whole(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    with _posted(url, asked) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


@contextmanager
def _posted(url: str, asked: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SILENCE_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise AssertionError(f"{url} answered {answer.status}: {answer.read()[:300]!r}")
        yield answer
    finally:
        connection.close()
