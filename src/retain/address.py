"""Tier addresses, read strictly: `memory:4GiB`, `disk:PATH?capacity=50GiB&codec=lossless`,
`redis://HOST:PORT?prefix=kv:`, `https://HOST/PATH`, `s3://BUCKET/PREFIX`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
DURATIONS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d)")
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BELOW = ("writes", "admit", "promote")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "memory": ("pins", "quota", "ttl", "ahead"),
    "disk": ("capacity", "codec", "keys", *_BELOW, "pins", "quota", "ttl"),
    "redis": ("capacity", "codec", "keys", *_BELOW, "prefix", "password", "ca", "cert", "key", "wait"),
    "http": ("capacity", "codec", "keys", *_BELOW, "write", "token", "ca", "wait"),
    "object": ("capacity", "codec", "keys", *_BELOW, "endpoint", "region", "wait"),
}
_BYTENANT = ("quota", "ttl")
_SECRETS = ("keys", "password", "token")
_SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), "redis"),
    **dict.fromkeys(("http", "https"), "http"),
    **dict.fromkeys(("s3", "gs", "az"), "object"),
}
_KINDS = ("memory", "disk", *_SCHEMES)


@dataclass(frozen=True)
class Rules:
    """What a tier takes, and how long it keeps it (docs/policies.md). Sizes in bytes, times in seconds.

    `quotas` and `ttls` are by tenant; under "" stands what holds for every tenant that is not named.
    """

    writes: str = "back"
    admit: str = "all"
    promote: bool = True
    pins: int | None = None
    ahead: int = 0
    quotas: tuple[tuple[str, int], ...] = ()
    ttls: tuple[tuple[str, float], ...] = ()

    def quota(self, tenant: str) -> int | None:
        """The most bytes that a tenant may have in the tier, None without a bound."""
        quotas = dict(self.quotas)
        return quotas.get(tenant, quotas.get(""))

    def ttl(self, tenant: str) -> float | None:
        """How many seconds blocks are kept, None without a bound; those of no tenant ("") too."""
        ttls = dict(self.ttls)
        return ttls.get(tenant, ttls.get(""))

    def options(self) -> list[str]:
        """The options of an address that say this, but for what holds anyway."""
        said = [f"{name}={value}" for name, value in (("writes", self.writes), ("admit", self.admit))]
        said = [each for each in said if each not in ("writes=back", "admit=all")]
        said += [] if self.promote else ["promote=no"]
        said += [] if self.pins is None else [f"pins={format_size(self.pins)}"]
        said += [f"ahead={self.ahead}"] if self.ahead else []
        said += [f"{_of_tenant('quota', name)}={format_size(size)}" for name, size in self.quotas]
        said += [f"{_of_tenant('ttl', name)}={format_duration(seconds)}" for name, seconds in self.ttls]
        return said


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
    rules: Rules = Rules()

    def __str__(self) -> str:
        """The address again, as `parse_tier` reads it."""
        options = []
        if self.capacity is not None and self.kind != "memory":
            options.append(f"capacity={format_size(self.capacity)}")
        if self.codec != "raw":
            options.append(f"codec={self.codec}")
        if self.keys is not None:
            options.append(f"keys={self.keys}")
        options.extend(f"{name}={value}" for name, value in self.options)
        options.extend(self.rules.options())
        place = self.url or f"{self.kind}:{self.path}"
        if self.kind == "memory":
            place = f"memory:{format_size(self.capacity or 0)}"
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
    rules = _rules(text, options)
    if kind == "memory":
        return TierAddress("memory", capacity=_capacity(text, place), rules=rules)
    limit = _capacity(text, options["capacity"]) if "capacity" in options else None
    codec = options.get("codec", "raw")
    _check_codec(text, codec)
    return TierAddress("disk", Path(place).expanduser(), limit, codec, options.get("keys"), rules=rules)


def with_defaults(address: TierAddress, rules: Rules) -> TierAddress:
    """The address of a tier of this host's own, with the quotas and times of `rules` where it names none
    itself.
    """
    if address.kind not in ("memory", "disk"):
        return address
    own = address.rules
    quotas = dict(rules.quotas) | dict(own.quotas)
    ttls = dict(rules.ttls) | dict(own.ttls)
    return replace(address, rules=replace(own, quotas=tuple(quotas.items()), ttls=tuple(ttls.items())))


def _rules(text: str, options: dict[str, str]) -> Rules:
    """Take the options that are rules out of an address's."""
    quotas: list[tuple[str, int]] = []
    ttls: list[tuple[str, float]] = []
    for name in [each for each in options if each.partition(".")[0] in _BYTENANT]:
        kind, _, tenant = name.partition(".")
        value = options.pop(name)
        try:
            if kind == "quota":
                quotas.append((tenant, parse_size(value)))
            else:
                ttls.append((tenant, parse_duration(value)))
        except ConfigError as error:
            raise ConfigError(f"the tier {text!r}: its {name} {error}") from error
    pins = options.pop("pins", None)
    ahead = options.pop("ahead", "0")
    if not ahead.isdecimal() or int(ahead) > 1 << 16:
        raise ConfigError(f"the tier {text!r} has ahead={ahead}; write a number of blocks")
    return Rules(
        _word(text, options, "writes", ("back", "through", "evicted")),
        _word(text, options, "admit", ("all", "reused")),
        _word(text, options, "promote", ("yes", "no")) == "yes",
        None if pins is None else _capacity(text, pins),
        int(ahead),
        tuple(quotas),
        tuple(ttls),
    )


def _word(text: str, options: dict[str, str], name: str, known: tuple[str, ...]) -> str:
    word = options.pop(name, known[0])
    if word not in known:
        raise ConfigError(
            f"the tier {text!r} has {name}={word}; write {' or '.join(known)}" + suggestion(word, known)
        )
    return word


def _of_tenant(option: str, tenant: str) -> str:
    return f"{option}.{tenant}" if tenant else option


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
    rules = _rules(text, options)
    capacity = options.pop("capacity", None)
    if capacity is not None and kind == "http" and options.get("write") != "yes":
        raise ConfigError(
            f"the tier {text!r} is only read, so it cannot have a capacity; write=yes changes that"
        )
    limit = None if capacity is None else _capacity(text, capacity)
    keys = options.pop("keys", None)
    return TierAddress(kind, None, limit, codec, keys, url, tuple(options.items()), rules)


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
        base, dot, tenant = name.partition(".")
        by_tenant = bool(dot) and base in _BYTENANT and base in _OPTIONS[kind]
        if by_tenant and not TENANT.fullmatch(tenant):
            raise ConfigError(f"the tier {text!r} names the tenant {tenant!r}, which no tenant can be called")
        if name not in _OPTIONS[kind] and not by_tenant:
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
        raise ConfigError(
            f"{text!r} is not a duration; write a number and {', '.join(DURATIONS)}, as in 200ms or 7d"
        )
    return float(match[1]) * DURATIONS[match[2]]


def format_duration(seconds: float) -> str:
    """The shortest text of a duration that `parse_duration` reads back."""
    for unit, factor in sorted(DURATIONS.items(), key=lambda item: -item[1]):
        if seconds and (seconds / factor).is_integer():
            return f"{int(seconds / factor)}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


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
