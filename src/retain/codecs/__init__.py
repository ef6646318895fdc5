"""Codecs: how a block's numbers are encoded. `codec(name)` gives one by its word."""

from retain.codecs.base import Codec
from retain.codecs.ladder.codec import Rung
from retain.codecs.ladder.int8 import Int8
from retain.codecs.ladder.levels import LEVELS
from retain.codecs.lossless import Lossless
from retain.codecs.raw import Raw
from retain.errors import ConfigError

_ALL: tuple[Codec, ...] = (Raw(), Lossless(), Int8(), *(Rung(level) for level in LEVELS))
CODECS: dict[str, Codec] = {each.name: each for each in _ALL}


def codec(name: str) -> Codec:
    """The codec called `name`; raises ConfigError for a word nobody knows."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; known are {', '.join(CODECS)}") from None


__all__ = ["CODECS", "Codec", "codec"]
