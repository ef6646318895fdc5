"""Stop strings and tool calls in a growing text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from retain.gateway.stops import StopStrings, ToolCall, ToolCalls

few = st.text(alphabet="ab<", max_size=30)


def cut(text: str, stops: list[str]) -> str:
    """What must be shown of a text: everything before the stop string that ends first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    few, st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30))
)
def test_a_stop_string_cuts_the_text_wherever_its_pieces_begin(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(at, len(text)) for at in cuts)})
    filtered = StopStrings(stops)
    shown = ""
    for low, high in itertools.pairwise(borders):
        shown += filtered.push(text[low:high])
        assert cut(text, stops).startswith(shown), "a part of a stop string leaked"
    shown += filtered.end()
    assert shown == cut(text, stops)
    assert filtered.stopped == (cut(text, stops) != text or any(text.endswith(s) for s in stops))


def test_what_might_become_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    filtered = StopStrings(["###"])
    assert filtered.push("a##") == "a"
    assert filtered.push("b") == "##b"
    assert filtered.push("c#") == "c"
    assert filtered.end() == "#"


def test_a_tool_call_is_taken_out_of_the_text_however_it_is_split() -> None:
    text = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> Done.'
    for size in range(1, len(text)):
        calls = ToolCalls()
        shown = ""
        found: list[ToolCall] = []
        for at in range(0, len(text), size):
            more, new = calls.push(text[at : at + size])
            shown, found = shown + more, found + new
        more, new = calls.end()
        assert (shown + more, found + new) == ("Let me see.  Done.", [ToolCall("f", '{"x": 1}')])


def test_what_is_no_call_in_json_stays_text() -> None:
    for text in (
        "<tool_call>no</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_",
    ):
        calls = ToolCalls()
        shown, found = calls.push(text)
        more, new = calls.end()
        assert (shown + more, found + new) == (text, [])


def test_several_calls_in_a_list_and_a_last_call_without_its_end() -> None:
    calls = ToolCalls()
    _, found = calls.push(
        '<tool_call>[{"name": "a"}, {"name": "b", "parameters": {}}]</tool_call><tool_call>{"name": "c"}'
    )
    assert [call.name for call in found] == ["a", "b"]
    assert calls.end() == ("", [ToolCall("c", "{}")])
