"""Traces of real requests as chains of block numbers: Mooncake's and WEKA's, or a file of their form."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from retain.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
NAMES = ("mooncake-conversation", "mooncake-synthetic", "weka", "weka-eighth")

_ARCHIVES = {"mooncake": "mooncake_fast25_partial.tar.zst", "weka": "agentic_coding_weka.tar.zst"}
_WINDOW_BYTES = 1 << 27
"""The archives are compressed with `zstd --long=27`."""


@dataclass(frozen=True)
class Request:
    """One request: its input tokens, and the numbers of its full blocks; equal numbers: equal prefix."""

    tokens: int
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and how many tokens one of their blocks holds."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        """Input tokens of all requests."""
        return sum(request.tokens for request in self.requests)


def read_trace(name: str, data: Path | None) -> Trace:
    """The trace called `name`, from the folder `data`, or the JSON-lines file of that path.

    The folder holds the published archives (`*.tar.zst`) or their unpacked form. Raises ConfigError.
    """
    if name not in NAMES:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"no trace is called {name!r}; known are {', '.join(NAMES)}, or give a file")
        return _lines(path.stem, path.read_bytes())
    if data is None:
        raise ConfigError(
            f"the trace {name} needs the folder of traces: give --data FOLDER or set RETAIN_DATA"
        )
    family, _, part = name.partition("-")
    if family == "mooncake":
        wanted = f"{part}_trace.jsonl"
        for file, content in _files(data, family, wanted):
            if file.endswith(wanted):
                return _lines(name, content)
        raise ConfigError(f"the folder {data} holds no {wanted}, and no archive with it")
    conversations = [(path, json.loads(content)) for path, content in _files(data, "weka", "trace_*.json")]
    if not conversations:
        raise ConfigError(f"the folder {data} holds neither {_ARCHIVES['weka']} nor its trace_*.json files")
    ordered = [document for _, document in sorted(conversations, key=lambda item: item[0])]
    # All of it is 94 million touches; every eighth conversation is enough to try a policy on.
    return _conversations(name, ordered[::8] if part == "eighth" else ordered)


def _files(data: Path, family: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    if not data.is_dir():
        raise ConfigError(f"the data folder {data} does not exist")
    unpacked = sorted(data.rglob(pattern))
    for path in unpacked:
        yield str(path), path.read_bytes()
    archive = data / _ARCHIVES[family]
    if unpacked or not archive.is_file():
        return
    with archive.open("rb") as packed:
        stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(packed)
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as members:
            for member in members:
                content = members.extractfile(member) if member.name.endswith((".json", ".jsonl")) else None
                if content is not None:
                    yield member.name, content.read()


def _lines(name: str, content: bytes) -> Trace:
    requests = []
    block_tokens = MOONCAKE_BLOCK_TOKENS
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            block_tokens = int(row.get("block_size", block_tokens))
            requests.append(_request(int(row["input_length"]), row["hash_ids"], block_tokens))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"line {number} of the trace {name} is no request: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {name} holds no request")
    return Trace(name, block_tokens, tuple(requests))


def _conversations(name: str, documents: list[dict[str, Any]]) -> Trace:
    """All conversations at once, requests in order of their time since each conversation's start.

    Block numbers are local to a conversation; they are made global by the conversation's place in the trace.
    A sub-agent's requests are part of its conversation.
    """
    timed: list[tuple[float, int, Request]] = []
    block_tokens = int(documents[0]["block_size"])
    for place, document in enumerate(documents):
        for row in _flat(document["requests"]):
            request = _request(int(row["in"]), row["hash_ids"], block_tokens)
            timed.append((float(row["t"]), place, Request(request.tokens, request.blocks + (place << 32))))
    timed.sort(key=lambda item: item[:2])
    return Trace(name, block_tokens, tuple(request for _, _, request in timed))


def _flat(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["type"] == "subagent":
            yield from _flat(row["requests"])
        else:
            yield row


def _request(tokens: int, numbers: list[int], block_tokens: int) -> Request:
    return Request(tokens, np.array(numbers[: tokens // block_tokens], np.int64))
