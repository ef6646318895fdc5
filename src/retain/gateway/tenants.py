"""Tenants: who asks. Each API key is one, with spaces of its own, so that nobody meets another's KV."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from retain.errors import ConfigError
from retain.gateway.refusal import Refusal

OPERATOR = "admin"
"""The name whose key may look at everything and clear everything."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")


@dataclass(frozen=True)
class Tenant:
    """An authenticated caller; `name` None is everybody, where there are no keys."""

    name: str | None = None

    @property
    def is_operator(self) -> bool:
        return self.name is None or self.name == OPERATOR


class Tenants:
    """The API keys of a server. Without any, everybody is one tenant."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._digests = [(Tenant(name), _digest(key)) for name, key in (keys or {}).items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def of(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header. Raises Refusal.

        Every key is compared, in constant time, so that the time taken says nothing of how near a guess is.
        """
        if not self._digests:
            return Tenant()
        scheme, _, key = (authorization or "").partition(" ")
        if not key or scheme.lower() != "bearer":
            raise _unauthorized(
                "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.", None
            )
        given = _digest(key.strip())
        found = None
        for tenant, digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise _unauthorized("The API key is not one of this server's.", "invalid_api_key")
        return found

    def operator(self, authorization: str | None) -> Tenant:
        """The tenant of the header, who must be the operator. Raises Refusal."""
        tenant = self.of(authorization)
        if not tenant.is_operator:
            raise Refusal(
                403, f"This needs the key named {OPERATOR!r}; start the server with --api-key {OPERATOR}=KEY."
            )
        return tenant


def read_api_keys(lines: Iterable[str], file: Path | None = None) -> dict[str, str]:
    """`NAME=KEY` texts, and those of a file with one a line (`#` begins a comment line). Raises ConfigError.

    A refused text is named by its number, never quoted: it may hold a key.
    """
    given = [(f"API key {number}", line) for number, line in enumerate(lines, 1)]
    if file is not None:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of API keys {file} cannot be read: {error}") from error
        listed = enumerate(text.splitlines(), 1)
        given += [
            (f"line {number} of {file}", line)
            for number, line in listed
            if line.strip() and line.strip()[0] != "#"
        ]
    keys: dict[str, str] = {}
    for place, line in given:
        name, equals, key = line.strip().partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{place} is not of the form NAME=KEY, with a name of letters, digits, '.', '_' and '-'"
            )
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{place}: the key of {name} must have 8 to 512 visible ASCII characters")
        if name in keys:
            raise ConfigError(f"{place}: {name} has a key already; each name has one")
        if key in keys.values():
            raise ConfigError(f"{place}: the key of {name} is another name's too; each tenant needs its own")
        keys[name] = key
    return keys


def check_bind(host: str, keys: Mapping[str, str], allow_open: bool) -> None:
    """Refuse to serve without keys where other machines can reach the port. Raises ConfigError."""
    if keys or allow_open or is_loopback(host):
        return
    raise ConfigError(
        f"binding to {host} without API keys would let everyone on the network use this server and what it "
        "keeps; give --api-key NAME=KEY, bind to 127.0.0.1, or say --allow-open"
    )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _unauthorized(message: str, code: str | None) -> Refusal:
    return Refusal(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
