"""The store behind a tier's address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retain.address import TierAddress, parse_duration
from retain.errors import ConfigError
from retain.stores.base import Store


def open_store(address: TierAddress) -> Store:
    """Open the store of an address. Raises ConfigError, MissingDependency, and StoreUnavailable for a folder
    that cannot be used; a remote server that does not answer is no error, but a tier that is down.
    """
    store = _open(address)
    if address.keys is None:
        return store
    from retain.stores.encrypted import encrypted, read_keys

    return encrypted(store, read_keys(secret(address.keys)))


def _open(address: TierAddress) -> Store:
    if address.kind == "memory":
        from retain.stores.memory import READY, MemoryStore

        capacity = address.capacity or 0
        return MemoryStore(capacity, min(READY, capacity // 4))
    if address.kind == "disk":
        from retain.stores.disk import DiskStore

        if address.path is None:
            raise ConfigError(f"the tier {address} names no folder")
        return DiskStore(address.path)
    options: dict[str, Any] = dict(address.options)
    wait: Any = {"wait": parse_duration(options.pop("wait"))} if "wait" in options else {}
    secrets: Any = {name: secret(options.pop(name)) for name in ("password", "token") if name in options}
    if address.kind == "redis":
        from retain.stores.redis import RedisStore

        return RedisStore(address.url, **secrets, **options, **wait)
    if address.kind == "http":
        from retain.stores.http import HttpStore

        write = options.pop("write", "no") == "yes"
        return HttpStore(address.url, writable=write, **secrets, **options, **wait)
    from retain.stores.object import ObjectStore

    return ObjectStore(address.url, **secrets, **options, **wait)


def secret(place: str) -> str:
    """The secret that `file:PATH` or `env:NAME` points to. Raises ConfigError."""
    kind, _, where = place.partition(":")
    if kind == "env":
        if where not in os.environ:
            raise ConfigError(f"the environment variable {where} with a secret in it is not set")
        return os.environ[where].strip()
    if kind != "file":
        raise ConfigError(f"{place!r} does not say where a secret lies; write file:PATH or env:NAME")
    try:
        return Path(where).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret in {where} cannot be read: {error}") from error
