"""Why a prompt missed: the first token that differs from the nearest kept prompt, and how it differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retain.gateway.tokenizer import Passage, Prompt
from retain.identity import TAIL_TOKENS, Tokens

CONTEXT = 48
"""Characters shown on either side of a difference."""

BEFORE_TOKENS = 64
"""Tokens in front of the difference that are looked at: enough for a line or a JSON key."""

AFTER_TOKENS = 256
"""Tokens behind it on the prompt's side: as many as the cache tells of the kept side, one block."""

PROBE = 24
"""Characters by which a message is found again: a short question has them, chance does not repeat them."""

LINE = 256
"""Characters on either side of a difference in which a date, number or identifier is looked for."""

HEADER = 8
"""Characters before a message by which its beginning is known from a place within another."""


@dataclass(frozen=True)
class Kept:
    """What the cache has that is nearest to the prompt: tokens in common, and the kept tokens from there on.

    `readable` is False when the nearest kept prompt was computed by another variant of the model, so that it
    can be compared and not used.
    """

    common: int
    tokens: Tokens
    readable: bool = True


@dataclass(frozen=True)
class Miss:
    """Why tokens had to be computed. `reason` is one of the words in docs; `words` says it in a sentence.

    `index` is the first token that differs, `token` and `kept_token` its text here and in the kept prompt,
    and `text` and `kept_text` the same place with a little context. All are None where there is nothing to
    compare with.
    """

    reason: str
    words: str
    index: int | None = None
    token: str | None = None
    kept_token: str | None = None
    text: str | None = None
    kept_text: str | None = None
    where: str | None = None


def explain(
    prompt: Prompt, kept: Kept | None, reused: int, decode: Callable[[Sequence[int]], str]
) -> Miss | None:
    """Why only `reused` tokens of the prompt could be used again; None where nothing that is kept was missed.

    `kept` is the nearest kept prompt before this one was stored, in the same space, so that an explanation
    never shows one tenant's text to another.
    """
    total = int(prompt.tokens.size)
    if reused + TAIL_TOKENS >= total:
        return None
    if kept is None or (kept.common == 0 and kept.tokens.size == 0):
        return Miss("nothing_kept", "Nothing that begins like this prompt has been kept yet.")
    if kept.common >= reused + TAIL_TOKENS:
        if not kept.readable:
            return Miss(
                "other_variant",
                f"{kept.common} tokens are kept, but were computed by another variant of this model (other "
                "weights, number format or engine), whose KV is not used for this one.",
            )
        return Miss(
            "not_loaded",
            f"{kept.common} tokens agree with a kept prompt, but only {reused} were used: the rest was "
            "evicted, could not be read or restored, or would have taken longer to load than to compute.",
        )
    if kept.tokens.size == 0 or kept.common >= total:
        return None
    return _Difference(prompt, kept, decode).miss()


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIMESTAMP = re.compile(
    rf"""
    \d{{4}}-\d{{2}}-\d{{2}}
      (?:[T ]\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?(?:\ ?(?:Z|UTC|[+-]\d{{2}}:?\d{{2}}))?
    | (?:\b{_DAY},?\ )?(?:\b\d{{1,2}}\ {_MONTH}|\b{_MONTH}\ +\d{{1,2}}(?:st|nd|rd|th)?),?
      (?:\ \d{{1,2}}:\d{{2}}(?::\d{{2}})?)?(?:\ (?:UTC|GMT))?(?:\ \d{{4}})?
    | \b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b
    | \b\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\ ?[AaPp][Mm])?\b
    | \b{_DAY}\b
    | \b1\d{{9}}(?:\.\d+)?\b | \b1\d{{12}}\b | \b1\d{{18}}\b
    """,
    re.VERBOSE,
)
_UNIQUE = re.compile(
    r"""
    \b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b
    | \b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b
    """,
    re.VERBOSE,
)
_MIXED = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9_-]{8,}={0,2}")
_LABELLED = re.compile(
    r"""
    (?:nonce|uuid|guid|cch|salt|seed|\bid
      |(?:request|session|trace|span|run|call|conversation|message|correlation)[-_ ]?id)
    ["']?\s*[:=]\s*["']?(?P<value>[^\s"',;<>]+)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b")
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')


class _Difference:
    """The place where a prompt and the nearest kept prompt part, with the text on both sides."""

    def __init__(self, prompt: Prompt, kept: Kept, decode: Callable[[Sequence[int]], str]) -> None:
        self.prompt = prompt
        self.index = kept.common
        tokens = prompt.tokens
        self.token = decode([int(tokens[self.index])])
        self.kept_token = decode([int(kept.tokens[0])])
        start = max(0, self.index - BEFORE_TOKENS)
        lead = [int(token) for token in tokens[start : self.index]]
        # Both sides are decoded together with what stands before them, for a character may reach over a
        # token's border.
        ours = decode([*lead, *map(int, tokens[self.index : self.index + AFTER_TOKENS])])
        theirs = decode([*lead, *map(int, kept.tokens)])
        self.at = _common_length(ours, theirs)
        self.ours, self.theirs = ours, theirs
        # Either side may end within a character, where the tokens at hand end.
        self.same_text = self.at >= min(len(ours.rstrip("\ufffd")), len(theirs.rstrip("\ufffd")))
        self.before_start = len(decode([int(token) for token in tokens[:start]]))
        self.rest = decode([int(token) for token in tokens[self.index :]])
        self.passage = self._find_passage(self.before_start + self.at)

    def miss(self) -> Miss:
        reason, words = self._reason()
        low = max(0, self.at - CONTEXT)
        return Miss(
            reason,
            words,
            self.index,
            self.token,
            self.kept_token,
            self.ours[low : self.at + CONTEXT],
            self.theirs[low : self.at + CONTEXT],
            self.passage.what if self.passage else None,
        )

    def _reason(self) -> tuple[str, str]:
        for judge in (self._retokenised, self._reordered, self._volatile, self._shortened):
            found = judge()
            if found is not None:
                return found
        return self._changed()

    def _find_passage(self, at: int) -> Passage | None:
        inside = [passage for passage in self.prompt.passages if passage.start <= at <= passage.end]
        return inside[-1] if inside else None

    @property
    def _what(self) -> str:
        return self.passage.what if self.passage else "prompt"

    @property
    def _stable(self) -> bool:
        """Whether this is a part of the prompt that a client means to repeat word for word."""
        return self._what.startswith(("system", "tools", "prompt"))

    def _retokenised(self) -> tuple[str, str] | None:
        if not self.same_text:
            return None
        words = (
            f"The text of the {self._what} is the same, but its tokens differ from token {self.index} on: a "
            "kept answer was generated in other tokens than those its text is read as."
        )
        return "other_tokens", words

    def _reordered(self) -> tuple[str, str] | None:
        ours, theirs = self._quoted(self.ours), self._quoted(self.theirs)
        keys = ours is not None and theirs is not None and ours[1] and theirs[1]
        if keys and ours is not None and theirs is not None:
            elsewhere = set(_KEY.findall(self.rest))
            kept_keys = set(_KEY.findall(self.theirs[self.at :]))
            if theirs[0] in elsewhere or ours[0] in kept_keys:
                words = (
                    f"JSON keys in the {self._what} come in another order: {ours[0]!r} stands where the kept "
                    f"prompt has {theirs[0]!r}. Serialise with sorted keys."
                )
                return "reordered_keys", words
        if self._what == "tools" and len(self.prompt.tools) > 1:
            return self._reordered_tools()
        return None

    def _reordered_tools(self) -> tuple[str, str] | None:
        ours, theirs = self._tools_from(self.ours), self._tools_from(self.theirs)
        if not ours or not theirs or ours[0] == theirs[0] or theirs[0] not in ours:
            return None
        at = ours.index(theirs[0])
        # Tools put in front of the others are an addition; one that the kept side has further on was moved.
        if ours[0] not in theirs and ours[at : at + len(theirs)] == theirs:
            return None
        words = (
            f"The tools come in another order: {ours[0]!r} stands where the kept prompt has {theirs[0]!r}. "
            "Send them in one order, for example sorted by name."
        )
        return "reordered_tools", words

    def _tools_from(self, text: str) -> list[str]:
        """The names of the tools from the difference on, that in which it lies included."""
        names = [match.group(1) for match in _NAME.finditer(text) if match.end() >= self.at]
        return [name for name in names if name in self.prompt.tools] if text is self.ours else names

    def _quoted(self, text: str) -> tuple[str, bool] | None:
        """The quoted word around the difference, and whether it is a JSON key."""
        start = text.rfind('"', 0, self.at)
        if start < 0 or "\n" in text[start : self.at]:
            return None
        end = text.find('"', max(self.at, start + 1))
        if end < 0:
            return None
        return text[start + 1 : end], bool(re.match(r"\s*:", text[end + 1 :]))

    def _volatile(self) -> tuple[str, str] | None:
        ours, low = self._line(self.ours)
        theirs, _ = self._line(self.theirs)
        at = self.at - low
        unique = "a value that looks unique to each request"
        for pattern, reason, kind, anywhere in (
            (_TIMESTAMP, "timestamp", "a date or time", True),
            (_UNIQUE, "nonce", unique, True),
            (_LABELLED, "nonce", unique, True),
            (_MIXED, "nonce", unique, False),
            (_NUMBER, "counter", "a number", False),
        ):
            here, there = _covering(pattern, ours, at), _covering(pattern, theirs, at)
            if here is None or there is None or here == there or not (anywhere or self._stable):
                continue
            advice = (
                " Move it behind what stays the same: all after it is computed again." if self._stable else ""
            )
            changed = (
                f"The {self._what} contains {kind} that changed: {here!r}, in the kept prompt {there!r}."
            )
            return reason, changed + advice
        return None

    def _line(self, text: str) -> tuple[str, int]:
        low = max(text.rfind("\n", 0, self.at) + 1, self.at - LINE)
        high = text.find("\n", self.at, self.at + LINE)
        return text[low : high if high >= 0 else self.at + LINE], low

    def _shortened(self) -> tuple[str, str] | None:
        passages = self.prompt.passages
        later = [passage for passage in passages if passage.end >= self.before_start + self.at]
        if self._stable or not later:
            return None
        # The message that stands here now, with what the template puts before it: further on in the kept
        # prompt, if
        # some were left out before it.
        start = later[0].start - self.before_start
        stop = min(start + PROBE, later[0].end - self.before_start)
        probe = self.ours[max(0, start - HEADER) : stop]
        if start < 0 or stop - start < PROBE // 2 or self.theirs.find(probe, self.at) < 0:
            return None
        what = later[0].what
        return (
            "shortened_history",
            f"Messages were left out: the kept conversation has others before the {what}.",
        )

    def _changed(self) -> tuple[str, str]:
        what = self._what
        if self.ours[self.at :].split() == self.theirs[self.at :].split():
            return "whitespace", f"The {what} differs in white space only, from token {self.index} on."
        if what.startswith("system"):
            return "changed_system_prompt", f"The system prompt was changed, from token {self.index} on."
        if what == "tools":
            return "changed_tools", f"The tools were changed, from token {self.index} on."
        if what.startswith("user"):
            return "changed_user_text", f"The text of the {what} differs from token {self.index} on."
        if what.startswith("assistant"):
            words = (
                f"The {what} is not what was generated, from token {self.index} on: the client or the chat "
                "template renders the earlier answer differently."
            )
            return "changed_answer", words
        if what.startswith("tool"):
            return "changed_tool_result", f"The {what} differs from token {self.index} on."
        return "changed_text", f"The text differs from token {self.index} on."


def _covering(pattern: re.Pattern[str], text: str, at: int) -> str | None:
    """The match of `pattern` that the place `at` lies in or touches."""
    for match in pattern.finditer(text):
        group = "value" if "value" in pattern.groupindex else 0
        if match.start(group) <= at <= match.end(group):
            return match.group(group)
        if match.start() > at:
            return None
    return None


def _common_length(a: str, b: str) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low
