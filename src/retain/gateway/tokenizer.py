"""Between text and token ids: prompts and chats to tokens, generated tokens to text."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from retain.gateway.refusal import Refusal
from retain.identity import Tokens, as_tokens

PATIENCE = 64
"""Tokens that an unfinished character may be waited for. A real one is complete after three more bytes."""

UNFOUND = 64
"""Messages that a template may have changed beyond recognition before the search for them is given up."""

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more of these functions. "
    "Their signatures are within <tools></tools>:\n<tools>\n"
)
TOOLS_FOOT = (
    "\n</tools>\n\nFor each call, answer with a JSON object within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <function name>, "arguments": <arguments as an object>}\n</tool_call>'
)
"""How tools are told to a model whose template has no place for them: in the system message, in the form that
most open models were trained on (Hermes, Qwen)."""


class HuggingFaceTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...


@dataclass(frozen=True)
class Passage:
    """A stretch of a prompt's text, by characters, and what it is: system prompt, tools, user message, ..."""

    start: int
    end: int
    what: str


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt ready for the engine, with what is known of its parts."""

    tokens: Tokens
    passages: tuple[Passage, ...] = ()
    tools: tuple[str, ...] = ()


class Tokenizer:
    """A model's tokenizer. Safe from several threads."""

    def __init__(self, model: HuggingFaceTokenizer, vocabulary: int | None = None) -> None:
        self._model = model
        self._special = frozenset(model.all_special_ids)
        self._vocabulary = vocabulary
        # Fast tokenizers refuse a second encoder while they adjust themselves ("Already borrowed").
        self._encoding = threading.Lock()

    @cached_property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._vocabulary or max(self._model.get_vocab().values()) + 1

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: no text of more than this times n characters has only n tokens."""
        return max(map(len, self._model.get_vocab()))

    def warm(self) -> None:
        """Do what the first request would wait for: the vocabulary's measures, the template's compilation."""
        self.encode(f"{self.vocabulary} {self.longest}")
        with suppress(Refusal):
            self.chat([{"role": "user", "content": "."}], ())

    def encode(self, text: str) -> Tokens:
        """The tokens of a plain prompt, with what the tokenizer puts before every text."""
        with self._encoding:
            return as_tokens(self._model.encode(text, add_special_tokens=True))

    def check(self, tokens: Sequence[int]) -> Tokens:
        """Token ids of a caller; raises Refusal when one is not a token of this model."""
        ids = np.asarray(tokens, dtype=object)
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocabulary:
                raise Refusal(
                    400,
                    f"prompt[{index}]: {token} is not a token id of this model (0 to {self.vocabulary - 1})",
                    param="prompt",
                )
        return as_tokens(list(tokens))

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are no whole character become U+FFFD."""
        if not special:
            tokens = [token for token in tokens if token not in self._special]
        ids = [int(token) for token in tokens]
        return self._model.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def piece(self, token: int) -> tuple[str, list[int] | None]:
        """One token as log probabilities show it: its text, and its bytes where they are known."""
        text = self.text([token], special=True)
        if "\ufffd" not in text:
            return text, list(text.encode())
        spelled = self._model.convert_ids_to_tokens([token])[0]
        if len(spelled) == 6 and spelled.startswith("<0x"):
            return f"bytes:\\x{spelled[3:5].lower()}", [int(spelled[3:5], 16)]
        spelling = [_BYTE_OF.get(character) for character in spelled]
        if any(byte is None for byte in spelling):
            return text, None
        data = [byte for byte in spelling if byte is not None]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """The text that the model's chat template makes of a conversation; Refusal if it makes none."""
        if not self._model.chat_template:
            raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
        conversation = [dict(message) for message in messages]
        options: dict[str, Any] = {}
        if tools and "tools" in _source(self._model.chat_template):
            options["tools"] = list(tools)
        elif tools:
            conversation = _with_tools(conversation, tools)
        if "tool_calls" not in _source(self._model.chat_template):
            conversation = [_with_calls(message) for message in conversation]
        try:
            text = self._model.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # whatever a template raises says that it has no form for these messages
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Refusal(
                400, f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        return str(text)

    def prompt_of_chat(
        self, text: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> Prompt:
        """A chat's rendered text as tokens, with its passages."""
        with self._encoding:
            tokens = as_tokens(self._model.encode(text, add_special_tokens=False))
        names = tuple(str(tool["function"]["name"]) for tool in tools)
        return Prompt(tokens, find_passages(text, messages, names), names)


def find_passages(text: str, messages: Sequence[dict[str, Any]], tools: Sequence[str]) -> tuple[Passage, ...]:
    """Where each message's content and the tools lie in the rendered text, as far as they are found."""
    found = []
    at = unfound = 0
    numbers: dict[str, int] = {}
    labels = {
        "system": "system prompt",
        "user": "user message",
        "assistant": "assistant message",
        "tool": "tool result",
    }
    for message in messages:
        role = message["role"]
        numbers[role] = numbers.get(role, 0) + 1
        content = str(message["content"]).strip()
        start = text.find(content, at) if content else -1
        if start < 0:
            unfound += bool(content)
            if unfound > UNFOUND:
                break
            continue
        at = start + len(content)
        number = "" if role == "system" and numbers[role] == 1 else f" {numbers[role]}"
        found.append(Passage(start, at, labels[role] + number))
    places = [
        place for place in (text.find(json.dumps(name, ensure_ascii=False)) for name in tools) if place >= 0
    ]
    if places:
        head, foot = text.find("<tools>"), text.find("</tools>")
        start = head if 0 <= head < min(places) else min(places)
        end = max(foot, *places)
        found = [passage for passage in found if not start <= passage.start < end]
        found.append(Passage(start, end, "tools"))
    return tuple(sorted(found, key=lambda passage: passage.start))


class Decoding:
    """Generated tokens to text, as they come: never half a character, and the same text whatever the pace."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before = (
            0  # tokens from here on are decoded together, for a tokenizer may join neighbours differently
        )
        self._read = 0  # tokens before here have been given out in whole
        self._given = 0  # characters given out of the window's text

    def push(self, token: int) -> str:
        """The text that became certain with `token`; perhaps nothing."""
        self._tokens.append(token)
        text = self._tokenizer.text(self._tokens[self._before :])
        unfinished = text.endswith("\ufffd") and len(self._tokens) - self._read < PATIENCE
        certain = len(text) - 1 if unfinished else len(text)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if not unfinished:
            self._before, self._read = self._read, len(self._tokens)
            self._given = len(self._tokenizer.text(self._tokens[self._before :]))
        return new

    def end(self) -> str:
        """What is left: an unfinished character shows as U+FFFD."""
        return self._tokenizer.text(self._tokens[self._before :])[self._given :]


def _source(template: Any) -> str:
    return template if isinstance(template, str) else json.dumps(template)


def _with_tools(conversation: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    told = TOOLS_HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_FOOT
    if conversation and conversation[0]["role"] == "system":
        first = conversation[0]
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *conversation[1:]]
    return [{"role": "system", "content": told}, *conversation]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls are part of its text, for a template that knows no tool calls."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    ]
    told = "\n".join(([message["content"]] if message["content"] else []) + texts)
    return {**message, "content": told}


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level BPE vocabularies spell the 256 bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


_BYTE_OF = _byte_characters()
