"""Texts to learn a profile from that every machine has: Python's own documentation and programs, questions
made of them, and tables made here.
"""

from __future__ import annotations

import ast
import calendar
import importlib
import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from retain.errors import ConfigError
from retain.identity import Tokens

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text, those that a tokenizer puts before every text included."""

MODULES = (
    "asyncio.base_events", "tarfile", "http.client", "typing", "smtplib", "ast", "logging", "_pydecimal",
    "ssl", "subprocess", "unittest.mock", "email.message", "json.decoder", "datetime", "zipfile",
    "statistics", "xml.dom.minidom", "pathlib", "random", "ipaddress", "turtle", "mailbox", "doctest",
)  # fmt: skip
"""Programs of the standard library, none of them among those that benches and tests read."""

PACKAGES = (
    "torch", "transformers", "rich", "typer", "huggingface-hub", "tokenizers", "tqdm", "numpy",
    "markdown-it-py", "networkx", "regex", "click", "httpx", "sympy", "gguf", "packaging", "jinja2", "fsspec",
)  # fmt: skip
"""Packages that engines bring, for what they say of themselves: prose about other things than Python."""

MIX = ("prose", "code", "prose", "dialogue", "code", "prose", "table", "code")
"""The kinds of text in turn: KV of one kind alone costs others up to a quarter more bits."""

LEAST_TOKENS = 256


def calibration(encode: Encode, count: int, length: int) -> list[Tokens]:
    """`count` texts of `length` tokens, of all kinds in turn. The same on every machine with the same
    Python."""
    kinds = {
        "prose": _stretches(encode, _prose(), length),
        "code": _stretches(encode, _code(), length),
        "dialogue": _stretches(encode, _dialogues(), length),
        "table": _stretches(encode, _tables(), length),
    }
    found: list[Tokens] = []
    while len(found) < count:
        before = len(found)
        for kind in MIX:
            found.extend(islice(kinds[kind], 1 if len(found) < count else 0))
        if len(found) == before:
            raise ConfigError(f"this Python comes with texts for {len(found)} stretches, not {count}")
    return found


def from_files(encode: Encode, files: Sequence[Path], length: int) -> list[Tokens]:
    """The texts of files in stretches of `length` tokens. Raises ConfigError."""
    texts = []
    for file in files:
        try:
            texts.append(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {file} cannot be read: {error}") from error
    found = [part for text in texts for part in _parts(encode, text, length)]
    if not found:
        raise ConfigError(
            f"a text to learn from needs {LEAST_TOKENS} tokens at the least; "
            f"{', '.join(map(str, files)) or 'none'} has fewer"
        )
    return found


def _parts(encode: Encode, text: str, length: int) -> Iterator[Tokens]:
    ids = np.asarray(encode(text), np.uint32)
    for at in range(0, len(ids), length):
        if len(ids) - at >= LEAST_TOKENS:
            yield ids[at : at + length]


def _stretches(encode: Encode, texts: Iterator[str], length: int) -> Iterator[Tokens]:
    """Whole stretches of two texts or more: of a long one only the first part is used, for variety."""
    opening = len(encode(""))
    held: list[int] = []
    for text in texts:
        ids = encode(text)[opening if held else 0 :]
        held.extend(ids[: min(length - len(held), length // 2)])
        if len(held) >= length:
            yield np.asarray(held, np.uint32)
            held = []


def _prose() -> Iterator[str]:
    topics = importlib.import_module("pydoc_data.topics").topics
    descriptions = [text for name in PACKAGES if (text := _description(name))]
    for number, name in enumerate(sorted(topics)):
        if number < len(descriptions):
            yield descriptions[number]
        yield topics[name]


def _description(package: str) -> str:
    try:
        return str(importlib.metadata.metadata(package).json.get("description", ""))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _code() -> Iterator[str]:
    for name in MODULES:
        source = _source(name)
        if source:
            # From the middle on: a module's first lines are imports and licences.
            yield source[len(source) // 4 :]


def _dialogues() -> Iterator[str]:
    """Questions and answers made of docstrings, with the questions people ask."""
    rng = random.Random(1)
    openings = (
        "Could you tell me what {} does?", "What is {} for?", "Hi! I don't understand {}. Please explain it.",
        "Please describe {} in a few words, with an example.", "My friend told me to use {}. Is she right?",
    )  # fmt: skip
    for name in MODULES:
        source = _source(name)
        turns = []
        for node in ast.walk(ast.parse(source)) if source else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
                question = rng.choice(openings).format(f"{name}.{node.name}")
                turns.append(
                    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{doc}<|im_end|>\n"
                )
        if len(turns) > 8:
            yield "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + "".join(turns)


def _tables() -> Iterator[str]:
    rng = random.Random(2)
    words = sorted({word for word in " ".join(_prose()).split() if word.isalpha() and len(word) > 3})
    number = 0
    while True:
        names = rng.sample(words, 6)
        rows = [
            [rng.choice(words), *(f"{rng.lognormvariate(3, 2):.{rng.choice((0, 1, 2))}f}" for _ in names[1:])]
            for _ in range(60)
        ]
        when = [
            f"20{rng.randrange(10, 30)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}" for _ in rows
        ]
        made = (
            "\n".join([",".join(names), *(",".join(row) for row in rows)]),
            json.dumps([dict(zip(names, row, strict=True)) for row in rows[:30]], indent=1),
            calendar.TextCalendar().formatyear(2000 + rng.randrange(40)),
            "\n".join("| " + " | ".join(row) + " |" for row in [names, ["---"] * 6, *rows]),
            "\n".join(
                f"{day} {row[1]:>10} {row[2]:>12} {row[0]}" for day, row in zip(when, rows, strict=True)
            ),
        )
        yield made[number % len(made)] + "\n\n"
        number += 1


def _source(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text("utf-8")
