"""Why a prompt missed: the first difference and its reason in words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.gateway.explain import Kept, Miss, explain
from retain.gateway.tokenizer import Prompt, Tokenizer
from retain.identity import as_tokens
from tests.gateway.toy import ToyTokenizer

TOKENIZER = Tokenizer(ToyTokenizer())
LONG = " All of this is said again in every request, word for word." * 3


def decode(tokens: Any) -> str:
    return TOKENIZER.text(tokens, special=True)


def chat(*messages: tuple[str, str], tools: Any = ()) -> Prompt:
    conversation = [{"role": role, "content": content} for role, content in messages]
    return TOKENIZER.prompt_of_chat(TOKENIZER.chat(conversation, tools), conversation, tools)


def kept_of(prompt: Prompt, earlier: Prompt) -> Kept:
    """What the cache tells when `earlier` is all that it keeps: one block's tokens from the first difference
    on."""
    pairs = zip(prompt.tokens.tolist(), earlier.tokens.tolist(), strict=False)
    common = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(prompt.tokens.size, earlier.tokens.size)
    )
    return Kept(common, earlier.tokens[common : common + 256])


def why(prompt: Prompt, earlier: Prompt) -> Miss:
    kept = kept_of(prompt, earlier)
    miss = explain(prompt, kept, kept.common, decode)
    assert miss is not None
    assert miss.index == kept.common
    assert miss.token == decode([prompt.tokens[kept.common]])
    assert miss.kept_token == decode([kept.tokens[0]])
    assert miss.text is not None
    assert miss.kept_text is not None
    assert miss.text != miss.kept_text
    assert len(miss.text) <= 96
    return miss


def head(line: str, where: str = "system") -> Prompt:
    return chat((where, f"You are an agent.\n{line}\nObey.{LONG}"), ("user", "Go on."))


@pytest.mark.parametrize(
    ("ours", "kept", "reason"),
    [
        ("Time: 2026-12-01T08:00:01Z", "Time: 2026-12-01T08:00:02Z", "timestamp"),
        ("Today is 2026-12-01.", "Today is 2026-11-30.", "timestamp"),
        ("Today is Tuesday, December 1, 2026.", "Today is Monday, November 30, 2026.", "timestamp"),
        ("It is Tuesday.", "It is Wednesday.", "timestamp"),
        ("It is 1 Dec 2026", "It is 30 Nov 2026", "timestamp"),
        ("Tue Dec  1 07:32:40 UTC 2026", "Tue Dec  1 07:33:12 UTC 2026", "timestamp"),
        ("now=1796111608", "now=1796111777", "timestamp"),
        ("now=1796111608.25", "now=1796111608.75", "timestamp"),
        ("It is 9:05 am", "It is 9:06 am", "timestamp"),
        ("Date: 1.12.2026", "Date: 2.12.2026", "timestamp"),
        ("id 550e8400-e29b-41d4-a716-446655440000", "id 123e4567-e89b-12d3-a456-426614174000", "nonce"),
        ("x-billing-header: cch=f3a91;", "x-billing-header: cch=07b2e;", "nonce"),
        ("commit 0a1b2c3d4e5f", "commit 9f8e7d6c5b4a", "nonce"),
        ('{"request_id": "abc"}', '{"request_id": "xyz"}', "nonce"),
        ("nonce: hello", "nonce: world", "nonce"),
        ("Session req_8Fa3kQz7", "Session req_91xLmn04", "nonce"),
        ("This is request 17.", "This is request 18.", "counter"),
        ("You like cats.", "You like dogs.", "changed_system_prompt"),
        ("Money matters.", "Monkeys matter.", "changed_system_prompt"),
        ("Be kind.", "Be  kind.", "whitespace"),
    ],
)
def test_a26_the_reason_is_read_from_the_first_difference(ours: str, kept: str, reason: str) -> None:
    for prompt, earlier in ((head(ours), head(kept)), (head(kept), head(ours))):
        miss = why(prompt, earlier)
        assert miss.reason == reason
        assert miss.where == "system prompt"


def test_a26_the_words_show_both_values() -> None:
    miss = why(head("Time: 2026-12-01T08:00:01Z"), head("Time: 2026-12-01T08:00:02Z"))
    assert "'2026-12-01T08:00:01Z'" in miss.words
    assert "'2026-12-01T08:00:02Z'" in miss.words
    assert "Move it" in miss.words
    assert miss.text is not None
    assert "08:00:01Z" in miss.text
    assert miss.kept_text is not None
    assert "08:00:02Z" in miss.kept_text


def test_a_changed_question_is_no_nonce() -> None:
    miss = why(
        chat(("system", LONG), ("user", "What is 2 + 3? Please.")),
        chat(("system", LONG), ("user", "What is 2 + 4? Please, please.")),
    )
    assert (miss.reason, miss.where) == ("changed_user_text", "user message 1")


def tool(name: str, **parameters: Any) -> Any:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} it",
            "parameters": {"type": "object", **parameters},
        },
    }


def test_a26_tools_in_another_order_are_named() -> None:
    tools = [tool(name) for name in ("search", "write", "read", "run")]
    miss = why(
        chat(("user", "Go."), tools=[tools[0], *reversed(tools[1:])]), chat(("user", "Go."), tools=tools)
    )
    assert (miss.reason, miss.where) == ("reordered_tools", "tools")
    assert "'run'" in miss.words
    assert "'write'" in miss.words


def test_a26_json_keys_in_another_order_are_named() -> None:
    one = [tool("search", properties={"alpha": {"type": "string"}, "beta": {"type": "string"}})]
    two = [tool("search", properties={"beta": {"type": "string"}, "alpha": {"type": "string"}})]
    miss = why(chat(("user", "Go."), tools=one), chat(("user", "Go."), tools=two))
    assert miss.reason == "reordered_keys"
    assert "'alpha'" in miss.words
    assert "'beta'" in miss.words
    data = {"first": 1, "second": 2, "third": 3}
    turned = dict(reversed(data.items()))
    miss = why(head(json.dumps(data)), head(json.dumps(turned)))
    assert (miss.reason, miss.where) == ("reordered_keys", "system prompt")


def test_a_tool_that_was_added_or_changed_is_not_called_reordered() -> None:
    tools = [tool("search"), tool("write")]
    for changed in ([tool("other"), *tools], [tool("search", strict=True), tools[1]]):
        assert (
            why(chat(("user", "Go."), tools=changed), chat(("user", "Go."), tools=tools)).reason
            == "changed_tools"
        )


def test_a_history_whose_beginning_was_dropped_is_named() -> None:
    turns = [
        ("system", LONG),
        ("user", "Tell me about the sea."),
        ("assistant", "The sea is wide."),
        ("user", "And about the mountains, if you please?"),
        ("assistant", "They are high."),
        ("user", "Thank you."),
    ]
    miss = why(chat(turns[0], *turns[3:]), chat(*turns))
    assert miss.reason == "shortened_history"
    assert "user message 1" in miss.words


def test_an_answer_that_is_rendered_otherwise_is_named() -> None:
    question, more = ("user", "Why?"), ("user", "And then? Tell me more about it, please.")
    miss = why(
        chat(question, ("assistant", "Because."), more),
        chat(question, ("assistant", "<think>hm</think>Because."), more),
    )
    assert (miss.reason, miss.where) == ("changed_answer", "assistant message 1")


def test_equal_text_in_other_tokens_is_named() -> None:
    table = {1: "The ", 2: "quick ", 3: "fox", 4: "quick fox", 5: "s jump over the lazy dog"}

    def spell(tokens: Any) -> str:
        return "".join(table[int(token)] for token in tokens)

    miss = explain(Prompt(as_tokens([1, 4, *[5] * 30])), Kept(1, as_tokens([2, 3, *[5] * 20])), 1, spell)
    assert miss is not None
    assert (miss.reason, miss.index, miss.token, miss.kept_token) == (
        "other_tokens",
        1,
        "quick fox",
        "quick ",
    )


def test_a_difference_within_a_character_shows_whole_characters_before_it() -> None:
    miss = why(head("Grüße 🙂 und mehr"), head("Grüße 🙃 und mehr"))
    assert miss.text is not None
    assert "🙂" in miss.text
    assert miss.kept_text is not None
    assert "🙃" in miss.kept_text
    assert miss.reason == "changed_system_prompt"


def test_nothing_kept_and_kept_by_another_variant_and_not_loaded_differ() -> None:
    prompt = Prompt(as_tokens([65] * 300))
    none = explain(prompt, None, 0, decode)
    assert none is not None
    assert (none.reason, none.index, none.text) == ("nothing_kept", None, None)
    other = explain(prompt, Kept(256, as_tokens([66]), readable=False), 0, decode)
    assert other is not None
    assert (other.reason, "256 tokens" in other.words) == ("other_variant", True)
    gone = explain(prompt, Kept(256, as_tokens([66])), 100, decode)
    assert gone is not None
    assert gone.reason == "not_loaded"


def test_what_was_used_in_whole_or_continued_is_no_miss() -> None:
    prompt = Prompt(as_tokens([65] * 300))
    assert explain(prompt, Kept(300, as_tokens([])), 299, decode) is None
    assert explain(prompt, Kept(200, as_tokens([])), 200, decode) is None, (
        "the kept prompt ends where this one goes on"
    )
    assert explain(Prompt(as_tokens([65] * 9)), None, 0, decode) is None, "too short to be kept"


@given(st.text(max_size=200), st.text(max_size=200), st.integers(0, 64), st.booleans())
def test_any_two_prompts_can_be_explained(ours: str, theirs: str, reused: int, as_chat: bool) -> None:
    def make(text: str) -> Prompt:
        return chat(("system", text), ("user", text)) if as_chat else Prompt(TOKENIZER.encode(text))

    prompt, earlier = make(ours), make(theirs)
    kept = kept_of(prompt, earlier)
    miss = explain(prompt, kept, min(reused, kept.common), decode)
    if miss is not None and miss.text is not None and miss.kept_text is not None:
        assert len(miss.text) <= 96
        assert len(miss.kept_text) <= 96


def test_a_long_line_made_to_be_slow_is_explained_at_once() -> None:
    slow = "a-" * 20_000
    began = time.monotonic()
    why(head(f"{slow}x{slow}"), head(f"{slow}y{slow}"))
    assert time.monotonic() - began < 5
