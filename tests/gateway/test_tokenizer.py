"""Tokens to text as they come, chats to prompts, and the passages of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.gateway.refusal import Refusal
from retain.gateway.tokenizer import PATIENCE, Decoding, Tokenizer, find_passages
from tests.gateway.toy import END, ToyTokenizer


@given(st.binary(max_size=300))
def test_pieces_join_to_the_text_of_all_tokens_whatever_the_bytes(data: bytes) -> None:
    decoding = Decoding(Tokenizer(ToyTokenizer()))
    pieces = [decoding.push(byte) for byte in data]
    assert "".join(pieces) + decoding.end() == data.decode("utf-8", "replace")


@given(st.text(max_size=100))
def test_a_character_is_never_split(text: str) -> None:
    decoding = Decoding(Tokenizer(ToyTokenizer()))
    shown = ""
    for byte in text.encode():
        shown += decoding.push(byte)
        assert text.startswith(shown)
    assert shown + decoding.end() == text


def test_endless_broken_bytes_are_not_kept_for_ever() -> None:
    decoding = Decoding(Tokenizer(ToyTokenizer()))
    shown = "".join(decoding.push(0x80) for _ in range(10 * PATIENCE))
    assert len(shown) >= 10 * PATIENCE - 1
    assert len(shown + decoding.end()) == 10 * PATIENCE


def test_special_tokens_have_no_text_in_an_answer() -> None:
    tokenizer = Tokenizer(ToyTokenizer())
    decoding = Decoding(tokenizer)
    assert "".join(decoding.push(token) for token in (65, END, 66)) + decoding.end() == "AB"
    assert tokenizer.text([65, END], special=True) == "A<|im_end|>"


def test_a_token_that_is_no_whole_character_is_shown_by_its_bytes() -> None:
    tokenizer = Tokenizer(ToyTokenizer())
    assert tokenizer.piece(65) == ("A", [65])
    assert tokenizer.piece(0xE2) == ("bytes:\\xe2", [0xE2])


class Plain(ToyTokenizer):
    """A tokenizer whose template has no place for tools."""

    chat_template = "{% for message in messages %}"

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        assert "tools" not in options
        return super().apply_chat_template(conversation, **options)


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_told_in_the_system_message_where_the_template_has_no_place_for_them() -> None:
    tokenizer = Tokenizer(Plain())
    system = {"role": "system", "content": "Be kind."}
    user = {"role": "user", "content": "Go."}
    text = tokenizer.chat([system, user], [tool("add")])
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert tokenizer.chat([user], [tool("add")]).startswith("<|im_start|>system\n# Tools")
    assert tokenizer.chat([user], []) == "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    told = tokenizer.chat([user, {"role": "assistant", "content": "", "tool_calls": [call]}], [])
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in told


def test_a_template_that_refuses_a_conversation_gives_400_with_its_reason() -> None:
    class Strict(ToyTokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            raise ValueError("roles must alternate")

    with pytest.raises(Refusal, match="roles must alternate"):
        Tokenizer(Strict()).chat([{"role": "user", "content": "x"}], [])

    class Base(ToyTokenizer):
        chat_template = None  # type: ignore[assignment]

    with pytest.raises(Refusal, match="no chat template"):
        Tokenizer(Base()).chat([{"role": "user", "content": "x"}], [])


def test_passages_name_the_parts_of_a_prompt() -> None:
    tokenizer = Tokenizer(ToyTokenizer())
    messages = [
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Go."},
        {"role": "user", "content": ""},
        {"role": "tool", "content": "Go."},
    ]
    text = tokenizer.chat(messages, [tool("add"), tool("del")])
    found = {
        passage.what: text[passage.start : passage.end]
        for passage in find_passages(text, messages, ("add", "del"))
    }
    assert found.pop("tools").startswith('<tools>[{"type"')
    assert found == {
        "system prompt": "Be kind.",
        "user message 1": "Go.",
        "assistant message 1": "Go.",
        "tool result 1": "Go.",
    }
