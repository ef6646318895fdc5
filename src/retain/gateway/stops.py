"""Stop strings and tool calls: what is held back from a text that grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CALL_HEAD, CALL_FOOT = "<tool_call>", "</tool_call>"


class StopStrings:
    """Cuts a growing text before the first stop string, wherever the borders of its pieces lie.

    Of several, the one that ends first counts: generation would have ended there. Of two that end together,
    the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part that can be shown now. After a stop string was seen, nothing more comes."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown
        keep = max(held_back(self._held, stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCalls:
    """Takes `<tool_call>...</tool_call>` out of a growing text. What is not a call in JSON stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._calling = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that can be shown now, and the calls that became whole."""
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._calling:
                at = self._held.find(CALL_HEAD)
                if at < 0:
                    keep = held_back(self._held, CALL_HEAD)
                    shown.append(self._held[: len(self._held) - keep])
                    self._held = self._held[len(self._held) - keep :]
                    return "".join(shown), calls
                shown.append(self._held[:at])
                self._held = self._held[at:]
                self._calling = True
            at = self._held.find(CALL_FOOT)
            if at < 0:
                return "".join(shown), calls
            whole, self._held = self._held[: at + len(CALL_FOOT)], self._held[at + len(CALL_FOOT) :]
            self._calling = False
            read = _read_calls(whole[len(CALL_HEAD) : -len(CALL_FOOT)])
            calls.extend(read)
            if not read:
                shown.append(whole)

    def end(self) -> tuple[str, list[ToolCall]]:
        """What was held back: a call whose end was left out counts if it is whole otherwise."""
        held, self._held = self._held, ""
        if self._calling:
            self._calling = False
            read = _read_calls(held[len(CALL_HEAD) :])
            return ("", read) if read else (held, [])
        return held, []


def held_back(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0


def _read_calls(text: str) -> list[ToolCall]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_read_call(item) for item in (read if isinstance(read, list) else [read])]
    return [call for call in calls if call is not None] if all(calls) else []


def _read_call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(item["name"], text)
