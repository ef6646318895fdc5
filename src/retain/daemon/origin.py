"""A Retain origin: objects over HTTP, as files below a path, and the requests that retain.stores.http knows.

    GET, HEAD  PATH/ab/NAME       an object; Range, ETag, If-None-Match, Cache-Control: immutable
    PUT, DELETE  PATH/ab/NAME     where a token is configured
    POST  PATH/sizes              names, one a line: their sizes, one a line, `-` for none
    GET  PATH/objects?after=NAME  names, sizes and times, a page of them in the order of their names
    GET  PATH/retain.json         says that this is one

With a token, every request has to carry it (Authorization: Bearer TOKEN).
"""

from __future__ import annotations

import hmac
import json
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from retain.errors import ConfigError, InvalidObject, StoreError, StoreFull
from retain.stores.base import check_name

from .holdings import Holdings, Opened

PATH = "/kv"
PAGE = 1000
MOST_BYTES = 4 << 30
"""The largest object that is taken."""

MOST_QUESTIONS = 4 << 20
IDLE_SECONDS = 60.0
_PIECE = 1 << 20


class OriginHandler(BaseHTTPRequestHandler):
    """Serves `holdings` below PATH. Subclasses set `holdings`, and `token` where there is one."""

    holdings: Holdings
    token: str | None = None
    protocol_version = "HTTP/1.1"
    server_version = "retain"
    sys_version = ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if not self._admitted():
            return
        url = urlsplit(self.path)
        if url.path == f"{PATH}/retain.json":
            self._text(json.dumps({"retain": 1, "writable": self.token is not None}), "application/json")
        elif url.path == f"{PATH}/objects":
            after = parse_qs(url.query).get("after", [""])[0]
            rows = self.holdings.listed(after, PAGE)
            self._text("".join(f"{row.name} {row.size} {row.modified:.3f}\n" for row in rows), "text/plain")
        else:
            self._object(url.path)

    def do_HEAD(self) -> None:
        if self._admitted():
            self._object(self.path, head=True)

    def do_POST(self) -> None:
        if not self._admitted():
            return
        size = self._length()
        if self.path != f"{PATH}/sizes" or size is None or size > MOST_QUESTIONS:
            self._refuse(404, close=True)
            return
        names = self.rfile.read(size).decode("ascii", "replace").split("\n")
        try:
            sizes = self.holdings.sizes([check_name(name) for name in names])
        except ValueError:
            self._refuse(400)
            return
        self._text("\n".join("-" if size is None else str(size) for size in sizes), "text/plain")

    def do_PUT(self) -> None:
        name, size = self._name(self.path), self._length()
        if not self._admitted(write=True):
            return
        if name is None or size is None or size > MOST_BYTES:
            self._refuse(400 if name is None else 411 if size is None else 413, close=True)
            return
        received = _Body(self, size)
        try:
            self.holdings.put(name, size, received.fill)
        except StoreFull:
            received.skip()
            self._refuse(507)
        except InvalidObject as error:
            received.skip()
            self._refuse(422, str(error))
        except StoreError as error:
            received.skip()
            self._refuse(503, str(error))
        else:
            self._refuse(201)

    def do_DELETE(self) -> None:
        name = self._name(self.path)
        if self._admitted(write=True):
            self._refuse(404 if name is None or not self.holdings.delete(name) else 204)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news."""

    # objects

    def _object(self, path: str, *, head: bool = False) -> None:
        name = self._name(path)
        if name is None:
            self._refuse(404)
            return
        try:
            with self.holdings.opened(name) as found:
                if found is None:
                    self._refuse(404)
                else:
                    self._send_object(found, head)
        except StoreError:
            self._refuse(503)

    def _send_object(self, found: Opened, head: bool) -> None:
        etag = f'"{found.etag}"'
        if self.headers.get("If-None-Match") in (etag, "*"):
            self._refuse(304)
            return
        if self.headers.get("If-Match", etag) not in (etag, "*"):
            self._refuse(412)
            return
        first, stop, status = 0, found.size, 200
        wanted = None if head else self.headers.get("Range")
        if wanted is not None and (span := _range(wanted, found.size)) is not None:
            first, stop, status = *span, 206
            if first >= found.size:
                self._refuse(416, range_of=found.size)
                return
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - first))
        self.send_header("ETag", etag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Cache-Control", "public, max-age=31536000, immutable")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{found.size}")
        self.end_headers()
        if head:
            return
        try:
            found.send(self.connection, first, stop)
        except OSError:
            self.close_connection = True

    # answers

    def _admitted(self, *, write: bool = False) -> bool:
        if self.token is None:
            if write:
                self._refuse(403, "no token is configured, so nothing is taken", close=True)
            return not write
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return True
        self._refuse(401, close=True)
        return False

    def _refuse(
        self, status: int, reason: str = "", *, close: bool = False, range_of: int | None = None
    ) -> None:
        """Answer without an object. A request whose body was not read ends the connection."""
        body = f"{reason}\n".encode() if reason else b""
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if range_of is not None:
            self.send_header("Content-Range", f"bytes */{range_of}")
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        if close and self.command in ("PUT", "POST"):
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if body and self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)

    def _text(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _length(self) -> int | None:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdigit() else None

    def _name(self, path: str) -> str | None:
        parts = path.removeprefix(f"{PATH}/").split("/")
        if not path.startswith(f"{PATH}/") or len(parts) != 2 or parts[0] != parts[1][:2]:
            return None
        with suppress(ValueError):
            return check_name(parts[1])
        return None


class _Body:
    """The body of an upload, read into the place that it is meant for."""

    def __init__(self, handler: BaseHTTPRequestHandler, size: int) -> None:
        self._handler = handler
        self._left = size

    def fill(self, target: memoryview) -> None:
        """Raises InvalidObject when the client stops before the end."""
        reader: Any = self._handler.rfile
        done = 0
        while done < len(target):
            got = reader.readinto(target[done:])
            if not got:
                self._handler.close_connection = True
                raise InvalidObject("the upload ended early")
            done += got
            self._left -= got

    def skip(self) -> None:
        """Read and forget the rest, so that the client comes to read the answer."""
        scrap = memoryview(bytearray(_PIECE))
        with suppress(InvalidObject, OSError):
            while self._left:
                self.fill(scrap[: min(self._left, _PIECE)])


def serve(
    handler: type[OriginHandler],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    cert: str | None = None,
    key: str | None = None,
) -> ThreadingHTTPServer:
    """Serve from a thread of its own until `shutdown`. Raises OSError; ConfigError for other hosts than this
    one without a token.
    """
    if handler.token is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"serving on {host} takes a token: conversations are not for everybody")
    context = None
    if cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, key)
        except OSError as error:
            raise ConfigError(f"the certificate {cert} cannot be used: {error}") from error
    listening = _Server((host, port), handler)
    listening.context = context
    threading.Thread(target=listening.serve_forever, name="retain-http", daemon=True).start()
    return listening


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    context: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread: a client that does not go on with its handshake holds up nobody."""
        if self.context is not None:
            request.settimeout(IDLE_SECONDS)
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)
        if self.context is not None:
            with suppress(OSError):
                request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that break off are not news."""


def _range(text: str, size: int) -> tuple[int, int] | None:
    """The one range that is asked for, as first byte and end; None where it is none that is understood."""
    unit, _, span = text.partition("=")
    first, dash, last = span.strip().partition("-")
    if unit.strip() != "bytes" or not dash or not all(part.isdigit() or not part for part in (first, last)):
        return None
    if not first:
        return (max(0, size - int(last)), size) if last else None
    stop = min(size, int(last) + 1) if last else size
    return (int(first), stop) if not last or int(last) >= int(first) else None
