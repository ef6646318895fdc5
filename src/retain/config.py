"""Settings: one YAML file, then `RETAIN_*` variables, then flags; every value knows its source.

Nothing is ignored in silence: unknown keys, misspelt variables and wrong types are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from retain.address import (
    TENANT,
    Rules,
    TierAddress,
    parse_duration,
    parse_size,
    parse_tier,
    suggestion,
    with_defaults,
)
from retain.errors import ConfigError

T = TypeVar("T")

POLICIES = ("reuse-leaf", "lru-leaf", "lru")
CONFIG_VARIABLE = "RETAIN_CONFIG"
DEFAULT_FILE = Path("~/.config/retain/config.yaml")


@dataclass(frozen=True)
class Settings:
    """What the command line works with.

    `model` is a folder, a GGUF file or `smollm2`; `audit` the share of hits that are recomputed and compared;
    `fidelity` the lowest accepted of kept KV by requests that name none themselves (retain.fidelity);
    `data` the folder of traces and texts that benches and tests read. `quotas` and `ttls` (NAME=VALUE, or a
    bare VALUE for every tenant) hold in this host's own tiers that say nothing else in their addresses; they
    are in `tiers` already.
    """

    tiers: tuple[TierAddress, ...] = (
        TierAddress("memory", capacity=1 << 30),
        TierAddress("disk", Path("~/.cache/retain/kv").expanduser(), 10 << 30),
    )
    quotas: tuple[str, ...] = ()
    ttls: tuple[str, ...] = ()
    policy: str = "reuse-leaf"
    audit: float = 0.0
    fidelity: str = "kin"
    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    data: Path | None = None


@dataclass(frozen=True)
class Resolved:
    """The settings in force, and for each the place that its value comes from."""

    settings: Settings
    sources: Mapping[str, str]


def resolve(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolved:
    """Bring flags, variables, the file and the defaults together; the first that says something wins.

    A flag that is None or an empty sequence was not given. A file that was named (by `file` or
    RETAIN_CONFIG) must exist; the default one may be missing. Raises ConfigError.
    """
    surroundings = os.environ if environment is None else environment
    variables = {name: text for name, text in surroundings.items() if name.startswith("RETAIN_")}
    _refuse_unknown_variables(variables)
    values: dict[str, Any] = {}
    sources = {field.name: "default" for field in fields(Settings)}

    path, named_by = _file(file, variables)
    for key, value in _read_file(path, named_by).items():
        place = f"file {path}"
        values[key], sources[key] = _read(key, value, f"{key} in {path}"), place
    for name in _FIELDS:
        variable = variable_of(name)
        if variable in variables:
            values[name] = _read(name, _from_text(name, variables[variable]), variable)
            sources[name] = variable
    for name, given in (flags or {}).items():
        if given is None or given == () or given == []:
            continue
        flag = _flag_of(name)
        values[name], sources[name] = _read(name, given, flag), f"flag {flag}"
    settings = Settings(**values)
    rules = Rules(
        quotas=_by_tenant(settings.quotas, parse_size), ttls=_by_tenant(settings.ttls, parse_duration)
    )
    return Resolved(
        replace(settings, tiers=tuple(with_defaults(tier, rules) for tier in settings.tiers)), sources
    )


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"RETAIN_{name.upper()}"


def _flag_of(name: str) -> str:
    return {"tiers": "--tier", "api_keys": "--api-key", "quotas": "--quota", "ttls": "--ttl"}.get(
        name, f"--{name.replace('_', '-')}"
    )


def _refuse_unknown_variables(variables: Mapping[str, str]) -> None:
    known = [CONFIG_VARIABLE, *map(variable_of, _FIELDS)]
    for variable in sorted(variables):
        if variable not in known:
            raise ConfigError(
                f"the environment sets {variable}, which Retain does not know; known are {', '.join(known)}"
                + suggestion(variable, known)
            )


def _file(given: Path | None, variables: Mapping[str, str]) -> tuple[Path, str | None]:
    if given is not None:
        return given.expanduser(), "--config"
    if CONFIG_VARIABLE in variables:
        return Path(variables[CONFIG_VARIABLE]).expanduser(), CONFIG_VARIABLE
    return DEFAULT_FILE.expanduser(), None


def _read_file(path: Path, named_by: str | None) -> dict[str, object]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if named_by is None:
            return {}
        raise ConfigError(f"the file {path} named by {named_by} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from error
    try:
        document = yaml.load(text, _StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the configuration {path} is not valid YAML: {reason}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"the configuration {path} is a {type(document).__name__}, not a mapping of settings"
        )
    for key in document:
        if key not in _FIELDS:
            raise ConfigError(
                f"the configuration {path} has the unknown key {key!r}; known are {', '.join(_FIELDS)}"
                + suggestion(str(key), _FIELDS)
            )
    return document


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which plain YAML readers silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read(name: str, value: object, place: str) -> object:
    try:
        return _FIELDS[name](value)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _from_text(name: str, text: str) -> object:
    """A variable's text as the YAML file would hold the value; lists are separated by commas."""
    if name in ("tiers", "api_keys", "quotas", "ttls"):
        return [part.strip() for part in text.split(",") if part.strip()]
    if name in ("audit", "port"):
        try:
            return float(text) if name == "audit" else int(text)
        except ValueError:
            return text
    return text


def _tiers(value: object) -> tuple[TierAddress, ...]:
    tiers = tuple(parse_tier(text) for text in _texts(value, "a list of tier addresses"))
    places = [str(tier.path) if tier.path else tier.kind for tier in tiers]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"two tiers lie in the same place, {place}")
    return tiers


def _texts(value: object, wanted: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{value!r} is not {wanted}")
    return tuple(value)


def _by_tenant(texts: Sequence[str], parse: Callable[[str], T]) -> tuple[tuple[str, T], ...]:
    """NAME=VALUE texts as pairs; a bare VALUE is every other tenant's, under "". Raises ConfigError."""
    found: dict[str, T] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if equals and not TENANT.fullmatch(name):
            raise ConfigError(f"{text!r} is not of the form NAME=VALUE, or a bare VALUE for every tenant")
        if name in found:
            raise ConfigError(f"{text!r} says for a second time what holds for {name or 'every tenant'}")
        found[name] = parse(value)
    return tuple(found.items())


def _quotas(value: object) -> tuple[str, ...]:
    texts = _texts(value, "a list of sizes, as in 5GiB or alice=20GiB")
    _by_tenant(texts, parse_size)
    return texts


def _ttls(value: object) -> tuple[str, ...]:
    texts = _texts(value, "a list of times, as in 7d or alice=1h")
    _by_tenant(texts, parse_duration)
    return texts


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{value!r} is not a text")
    return value


def _policy(value: object) -> str:
    if value not in POLICIES:
        known = ", ".join(POLICIES)
        raise ConfigError(f"{value!r} is not a policy; known are {known}{suggestion(str(value), POLICIES)}")
    return str(value)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{value!r} is not a share from 0 to 1")
    return float(value)


def _fidelity(value: object) -> str:
    from retain.fidelity import checked

    return checked(_text(value))


def _port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"{value!r} is not a port from 0 to 65535")
    return value


def _keys(value: object) -> tuple[str, ...]:
    try:
        return _texts(value, "")
    except ConfigError:  # the value itself is a secret and is not repeated
        raise ConfigError("the API keys are not a list of NAME=KEY texts") from None


def _folder(value: object) -> Path:
    return Path(value if isinstance(value, Path) else _text(value)).expanduser()


_FIELDS: dict[str, Callable[[object], object]] = {
    "tiers": _tiers,
    "quotas": _quotas,
    "ttls": _ttls,
    "policy": _policy,
    "audit": _share,
    "fidelity": _fidelity,
    "model": _text,
    "host": _text,
    "port": _port,
    "api_keys": _keys,
    "data": _folder,
}
"""Each setting with the check of its value. A test keeps it in step with Settings."""
