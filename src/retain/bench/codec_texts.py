"""Texts that codecs are judged on: prose, code, dialogue and tables; no profile is learned from them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from retain.bench.texts import source_of
from retain.errors import ConfigError
from retain.identity import Tokens

Encode = Callable[[str], Sequence[int]]

_WINDOW_BYTES = 1 << 27
_SKIPPED_PASSAGES = 40
_DIALOGUE = 7
"""Which conversation of the airline is read: one that is long enough."""


@dataclass(frozen=True)
class Document:
    """A text to judge by: its kind, and as many token ids as were asked for."""

    kind: str
    tokens: Tokens


def documents(encode: Encode, length: int, files: Sequence[Path], data: Path | None) -> list[Document]:
    """`files` as they are, or one text of each kind out of `data`, of `length` tokens each.

    Raises ConfigError for a text that is too short or missing.
    """
    if files:
        texts = [(file.name, _read(file)) for file in files]
    elif data is None:
        raise ConfigError(
            "the texts to judge codecs by lie in the data folder: give --data FOLDER or set RETAIN_DATA, or "
            "give --text FILE"
        )
    else:
        texts = [
            ("prose", _prose(data)), ("code", source_of("argparse")), ("dialogue", _dialogue(data)),
            ("table", _table(data)),
        ]  # fmt: skip
    found = []
    for kind, text in texts:
        ids = np.asarray(encode(text)[:length], np.uint32)
        if len(ids) < length:
            raise ConfigError(f"the text {kind!r} has {len(ids)} tokens, too few for {length}")
        found.append(Document(kind, ids))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {file} cannot be read: {error}") from error


def _prose(data: Path) -> str:
    """Passages of MT-RAG, from articles and forums."""
    passages: dict[str, str] = {}
    for line in packed_text(data, "text_licence_clear.tar.zst", "mtragun_reference.jsonl").splitlines():
        for passage in json.loads(line)["contexts"]:
            passages.setdefault(passage["document_id"], passage["text"])
    return "\n\n".join(list(passages.values())[_SKIPPED_PASSAGES:])


def _dialogue(data: Path) -> str:
    """A conversation of tau-bench's airline, in the form of ChatML."""
    dialogues = json.loads(packed_text(data, "text_licence_clear.tar.zst", "gpt-4o-airline.json"))
    found = dialogues[_DIALOGUE]["traj"]
    return "".join(
        f"<|im_start|>{turn['role']}\n{turn.get('content') or json.dumps(turn.get('tool_calls'))}<|im_end|>\n"
        for turn in found
    )


def _table(data: Path) -> str:
    """Times and lengths of Azure's requests, as CSV."""
    return packed_text(data, "azure_llm_2023.tar.zst", "AzureLLMInferenceTrace_code.csv")[:60_000]


def packed_text(data: Path, archive: str, name: str) -> str:
    """A file by its name, in the folder or in the archive there."""
    for path in sorted(data.rglob(name)):
        return _read(path)
    packed = data / archive
    if not packed.is_file():
        raise ConfigError(f"the folder {data} holds neither {name} nor {archive}")
    with (
        packed.open("rb") as file,
        zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(file) as plain,
        tarfile.open(fileobj=io.BufferedReader(plain), mode="r|") as members,
    ):
        for member in members:
            if member.isfile() and Path(member.name).name == name:
                content = members.extractfile(member)
                if content is not None:
                    return content.read().decode("utf-8")
    raise ConfigError(f"the archive {packed} holds no {name}")
