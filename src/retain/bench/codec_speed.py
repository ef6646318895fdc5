"""How fast the ladder's entropy coder alone is, on the numbers of real KV, one core."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from retain.codecs.base import Array
from retain.codecs.ladder.coder import encode, numbers_of
from retain.codecs.ladder.levels import depth
from retain.codecs.ladder.profile import Profile
from retain.identity import Tokens

LEVEL = "balanced"
ROUNDS = 7


def rans_speeds(
    profile: Profile, arrays: Mapping[str, Array], tokens: Tokens, first: int
) -> tuple[float, float]:
    """Billions of symbols a second, encoded and decoded, at `balanced`; what classes leave out does not
    count.

    `arrays` are a block's, float32, behind a sequence's sinks; the shortest of some rounds counts.
    """
    streams = encode(profile, arrays, tokens, LEVEL, dtype="float32", first=first)
    symbols, encoding, decoding = 0, 0.0, 0.0
    for index, part in enumerate(profile.parts):
        rows = [streams[f"{word}.{index}"] for word in ("tiny", LEVEL)]
        coded = numbers_of(profile, part, rows, len(tokens))
        tables = profile.known_tables
        symbols += sum(int((coded.classes >= tables.first[at]).sum()) * len(tokens) for at in range(2))
        sides = (coded.classes, part.classes, coded.steps, coded.energy)
        copies = [coded.numbers.copy() for _ in range(ROUNDS)]  # encoding overwrites them
        encoding += min(_taken(profile.coder.encode, each, *sides, depth(LEVEL)) for each in copies)
        decoding += min(_taken(profile.coder.decode, rows, each, *sides) for each in copies)
    return symbols / encoding / 1e9, symbols / decoding / 1e9


def _taken(work: Callable[..., object], *given: object) -> float:
    """The CPU seconds of this thread that a call takes: other processes do not count."""
    started = time.thread_time()
    work(*given)
    return time.thread_time() - started
