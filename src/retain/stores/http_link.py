"""HTTP/1.1 as far as a store of files needs it: requests and answers that say how long their bodies are.

A general client would parse every header into objects and copy every body; here bodies go straight into the
caller's memory, and a hundred HEADs are sent before the first is answered.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from retain.errors import ConfigError
from retain.stores.link import Link, LinkBroken

MOST_HEADERS = 200
LATE_BYTES = 64 << 10
"""Up to so much of an unwanted body is read in order to keep the connection; for more it is closed."""

_TOKEN = re.compile(r"[\x21-\x7e]+")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Place:
    """Where an origin is: the parts of its URL, and what every request to it carries."""

    host: str
    port: int
    path: str
    headers: bytes = field(repr=False)
    tls: ssl.SSLContext | None
    shown: str

    @classmethod
    def parse(cls, url: str, token: str | None = None, ca: str | None = None) -> Self:
        """Read a URL. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of an origin; write https://HOST/PATH")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} has a user, query or fragment, which an origin's address has not")
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("a bearer token has no spaces or special characters")
        context = None
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca)
            except OSError as error:
                raise ConfigError(f"the certificates in {ca} cannot be read: {error}") from error
        elif ca is not None:
            raise ConfigError(f"{url!r} is without TLS, so certificates are of no use; write https")
        headers = f"Host: {parts.netloc}\r\nAccept-Encoding: identity\r\nUser-Agent: retain\r\n"
        if token is not None:
            headers += f"Authorization: Bearer {token}\r\n"
        path = quote(unquote(parts.path.rstrip("/")), safe="/-._~")
        default = 443 if context else 80
        shown = f"{parts.netloc}{path}"
        return cls(parts.hostname, port or default, path, headers.encode("ascii"), context, shown)


@dataclass(frozen=True)
class Answer:
    """The head of an answer. `length` is that of its body, None where it does not say."""

    status: int
    reason: str
    headers: Mapping[str, str]
    length: int | None

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    @property
    def first_byte(self) -> int | None:
        """Where the range begins that it holds."""
        match = _RANGE.fullmatch(self.headers.get("content-range", ""))
        return None if match is None else int(match[1])

    @property
    def total(self) -> int | None:
        """The size of the object of which it holds a range, or the whole."""
        match = _RANGE.fullmatch(self.headers.get("content-range", ""))
        if match is None:
            return self.length if self.status == 200 else None
        return None if match[3] == "*" else int(match[3])


class HttpLink:
    """One connection to an origin. Not safe from several threads."""

    def __init__(self, place: Place, link: Link) -> None:
        self._place = place
        self._link = link
        self._heads: list[bool] = []
        self._queued: list[bytes] = []
        self._broken = False

    @classmethod
    def connect(cls, place: Place, until: float) -> Self:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock = socket.create_connection((place.host, place.port), timeout=left)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if place.tls is not None:
                sock = place.tls.wrap_socket(sock, server_hostname=place.host)
            return cls(place, Link(sock))
        except BaseException:
            sock.close()
            raise

    def send(
        self,
        method: str,
        target: str,
        until: float,
        *,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
    ) -> None:
        """Send one request."""
        self.put_off(method, target, headers)
        self.push(until, body)

    def put_off(self, method: str, target: str, headers: Mapping[str, str] | None = None) -> None:
        """Have a request sent with the next `push`."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        first = f"{method} {target} HTTP/1.1\r\n".encode("ascii")
        self._queued.append(first + self._place.headers + lines.encode("ascii") + b"\r\n")
        self._heads.append(method == "HEAD")

    def push(self, until: float, body: Sequence[memoryview] = ()) -> None:
        queued, self._queued = self._queued, []
        self._link.send([b"".join(queued), *body], until)

    def answer(self, until: float) -> Answer:
        """The head of the answer to the oldest request that has none. Its body, if any, must be read next."""
        is_head = self._heads.pop(0)
        while True:
            answer = self._read_head(until)
            if answer.status >= 200:
                break
        self._broken = answer.closes or (answer.length is None and not is_head)
        return answer

    def fill(self, target: memoryview, until: float, stall: float) -> None:
        """The next bytes of the body."""
        self._link.fill(target, until, stall)

    def take(self, size: int, until: float) -> bytes:
        return self._link.take(size, until)

    def skip(self, size: int, until: float) -> None:
        self._link.skip(size, until)

    def forget(self, answer: Answer, until: float) -> None:
        """The body is of no interest."""
        if answer.length is not None and answer.length <= LATE_BYTES:
            self._link.skip(answer.length, until)
        else:
            self._broken = True

    def leave(self, size: int) -> None:
        """The last `size` bytes of the body are of no interest."""
        if size:
            self._broken = True

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: every answer was read to its end, and the origin goes on."""
        return not self._broken and not self._heads and not self._queued

    def close(self) -> None:
        self._link.close()

    def _read_head(self, until: float) -> Answer:
        first = self._link.line(until).decode("latin-1")
        version, _, rest = first.partition(" ")
        code, _, reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise LinkBroken(f"not an answer of HTTP/1.1: {first[:80]!r}")
        headers: dict[str, str] = {}
        while line := self._link.line(until):
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or len(headers) > MOST_HEADERS:
                raise LinkBroken(f"the answer has a header that is none: {line[:80]!r}")
            headers[name.lower()] = value.strip()
        status = int(code)
        if version == "HTTP/1.0" and headers.get("connection", "").lower() != "keep-alive":
            headers["connection"] = "close"
        length = headers.get("content-length", "")
        if status < 200 or status in (204, 304):
            return Answer(status, reason, headers, 0)
        if "transfer-encoding" in headers or not length.isdigit():
            return Answer(status, reason, headers, None)
        return Answer(status, reason, headers, int(length))


__all__ = ["Answer", "HttpLink", "Place"]
