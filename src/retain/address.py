"""Tier addresses, read strictly: `memory:4GiB`, `disk:PATH?capacity=50GiB&codec=lossless`,
`redis://HOST:PORT?prefix=kv:`, `https://HOST/PATH`, `s3://BUCKET/PREFIX`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from urllib.parse import urlsplit

from retain.errors import ConfigError

MAX_BYTES = (1 << 63) - 1
"""The largest size that a file or an arena can have, and so the largest capacity."""

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,9})?) ?([A-Za-z]{0,4})")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "memory": (),
    "disk": ("capacity", "codec", "keys"),
    "redis": ("codec", "keys", "prefix", "password", "ca", "cert", "key", "wait"),
    "http": ("codec", "keys", "write", "token", "ca", "wait"),
    "object": ("codec", "keys", "endpoint", "region", "wait"),
}
_SECRETS = ("keys", "password", "token")
_SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), "redis"),
    **dict.fromkeys(("http", "https"), "http"),
    **dict.fromkeys(("s3", "gs", "az"), "object"),
}
_KINDS = ("memory", "disk", *_SCHEMES)


@dataclass(frozen=True)
class TierAddress:
    """One tier as asked for: its kind, a disk tier's folder, its capacity in bytes, the codec of its objects.

    `capacity` None means that only the medium bounds the tier; 0 is legal and keeps nothing. `keys` says
    where the keys lie that its objects are encrypted with. A remote tier has a `url` and other options.
    """

    kind: str
    path: Path | None = None
    capacity: int | None = None
    codec: str = "raw"
    keys: str | None = None
    url: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The address again, as `parse_tier` reads it."""
        if self.kind == "memory":
            return f"memory:{format_size(self.capacity or 0)}"
        options = []
        if self.capacity is not None:
            options.append(f"capacity={format_size(self.capacity)}")
        if self.codec != "raw":
            options.append(f"codec={self.codec}")
        if self.keys is not None:
            options.append(f"keys={self.keys}")
        options.extend(f"{name}={value}" for name, value in self.options)
        place = self.url or f"{self.kind}:{self.path}"
        return place + (f"?{'&'.join(options)}" if options else "")


def parse_tier(text: str) -> TierAddress:
    """Read a tier's address. Raises ConfigError with the offending part of it.

    A disk path ends at the first `?`; a leading `~` is the home folder.
    """
    word, colon, rest = text.partition(":")
    if word not in _KINDS:
        raise ConfigError(
            f"the tier {text!r} is of no known kind; write memory:SIZE, disk:PATH?capacity=SIZE, or a URL "
            f"that begins with {', '.join(_SCHEMES)}" + suggestion(word, _KINDS)
        )
    kind = _SCHEMES.get(word, word)
    place, _, query = rest.partition("?")
    if word in _SCHEMES:
        return _remote(text, kind, f"{word}:{place}", _read_options(text, kind, query))
    if not colon or not place:
        wanted = {"memory": "a size, as in memory:4GiB", "disk": "a folder, as in disk:PATH?capacity=50GiB"}
        raise ConfigError(f"the tier {text!r} lacks {wanted[kind]}")
    options = _read_options(text, kind, query)
    if kind == "memory":
        return TierAddress("memory", capacity=_capacity(text, place))
    capacity = options.get("capacity")
    codec = options.get("codec", "raw")
    _check_codec(text, codec)
    limit = None if capacity is None else _capacity(text, capacity)
    return TierAddress("disk", Path(place).expanduser(), limit, codec, options.get("keys"))


def _remote(text: str, kind: str, url: str, options: dict[str, str]) -> TierAddress:
    try:
        parts = urlsplit(url)
        given = parts.password
    except ValueError as error:
        raise ConfigError(f"the tier {text!r} has a URL that cannot be read: {error}") from error
    if not url.partition(":")[2].startswith("//") or not (parts.netloc or parts.path.strip("/")):
        raise ConfigError(f"the tier {text!r} lacks a host; write {parts.scheme}://HOST")
    if given is not None:
        raise ConfigError(
            f"the tier at {parts.hostname} has a password in its address, where others can read it; write "
            "password=file:PATH or password=env:NAME"
        )
    codec = options.pop("codec", "raw")
    _check_codec(text, codec)
    if "wait" in options:
        parse_duration(options["wait"])
    if options.get("write", "yes") not in ("yes", "no"):
        raise ConfigError(f"the tier {text!r} has write={options['write']}; write yes or no")
    keys = options.pop("keys", None)
    return TierAddress(kind, None, None, codec, keys, url, tuple(options.items()))


def _check_codec(text: str, codec: str) -> None:
    if codec == "raw":
        return
    # Only where it is needed: codecs bring numpy, which would double the time of `retain --help`.
    from retain.codecs import CODECS

    if codec not in CODECS:
        raise ConfigError(
            f"the tier {text!r} names the unknown codec {codec!r}; known are {', '.join(CODECS)}"
            + suggestion(codec, CODECS)
        )


def _read_options(text: str, kind: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, equals, value = pair.partition("=")
        if name not in _OPTIONS[kind]:
            known = ", ".join(_OPTIONS[kind]) or "none"
            raise ConfigError(
                f"the tier {text!r} has the unknown option {name!r}; a {kind} tier knows {known}"
                + suggestion(name, _OPTIONS[kind])
            )
        if name in options:
            raise ConfigError(f"the tier {text!r} gives the option {name!r} twice")
        if not equals or not value:
            raise ConfigError(f"the tier {text!r} gives no value for the option {name!r}")
        if name in _SECRETS and not value.startswith(("file:", "env:")):
            raise ConfigError(
                f"the option {name!r} of a {kind} tier says where the secret lies, not what it is; write "
                f"{name}=file:PATH or {name}=env:NAME"
            )
        options[name] = value
    return options


def _capacity(text: str, size: str) -> int:
    try:
        return parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"the tier {text!r} has a capacity that cannot be used: {error}") from error


def parse_duration(text: str) -> float:
    """Seconds from `50ms` or `2s`. Raises ConfigError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write a number and ms or s, as in 200ms")
    return float(match[1]) * {"ms": 1e-3, "s": 1.0}[match[2]]


def parse_size(text: str) -> int:
    """Bytes from `4GiB` (powers of 1024), `5GB` (powers of 1000) or a plain number. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, as in 500MB or 4GiB")
    number, unit = match.groups()
    if unit not in UNITS:
        close = [each for each in UNITS if each != "KB" and each.lower().startswith(unit.lower())]
        hint = f"; did you mean {' or '.join(number + each for each in close)}?" if close else ""
        known = ", ".join(filter(None, UNITS))
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}; known are {known}{hint}")
    size = Fraction(number) * UNITS[unit]
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    if size > MAX_BYTES:
        raise ConfigError(f"{text!r} is more than any store can hold, which is {MAX_BYTES} bytes")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact text of a size that `parse_size` reads back: 4GiB, 500MB, 1B."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if unit and unit != "KB" and size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known word, or nothing."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
