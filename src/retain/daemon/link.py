"""A client's link to one boot of the daemon: its session, its connections, and the arena mapped."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from retain.model import ModelSpec

from . import messages, wire

CALL_SECONDS = 2.0
"""How long an ordinary request may take before the daemon counts as gone."""

LEAST_SECONDS = 0.01
"""What a request is given to be sent, however late it is."""


class Link:
    """One session with one boot of the daemon: its connections, and the arena mapped.

    `patience` is how many seconds the daemon may take to greet: one that has just been started opens its
    tiers first.
    """

    def __init__(
        self, dial: Callable[[], socket.socket], client: str, patience: float = CALL_SECONDS
    ) -> None:
        self._dial = dial
        self._client = client
        self._idle: list[socket.socket] = []
        self.lock = threading.RLock()  # leases may end while this thread holds it: when garbage is collected
        self.session = b""
        self.when_unused: Callable[[Link], None] = lambda link: None
        """Called once nothing of the arena is in use any more over a link that has broken."""

        self._in_use = 0
        self.alive = True
        self.boot = b""
        connection, welcome, fd = self._greet(patience)
        if fd is None:
            connection.close()
            raise wire.WireError("the daemon handed over no arena")
        self.session = welcome.session
        self.tiers = welcome.tiers
        try:
            self.readable = memoryview(mmap.mmap(fd, welcome.span, prot=mmap.PROT_READ))
            self.writable = memoryview(mmap.mmap(fd, welcome.span))
        except (OSError, ValueError) as error:
            connection.close()
            raise wire.WireError(f"the arena cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._idle.append(connection)
        self.models: dict[ModelSpec, int] = {}
        self.chains: OrderedDict[bytes, tuple[int, tuple[bytes, ...]]] = OrderedDict()
        self.owners: OrderedDict[bytes, str] = OrderedDict()
        self.numbers = 0

    def call(self, request: messages.Request, timeout: float) -> messages.Reply | None:
        """Send a request and wait for its reply; None for a one-way message. Raises WireError."""
        until = time.monotonic() + timeout
        connection = self._take(timeout)
        try:
            connection.settimeout(max(until - time.monotonic(), LEAST_SECONDS))
            wire.send_request(connection, request)
            reply: messages.Reply | None = None
            if not isinstance(request, messages.OneWay):
                boot, reply, fd = wire.receive_reply(connection, until)
                if fd is not None:
                    os.close(fd)
                if boot != self.boot:
                    raise wire.WireError("another daemon answered")
        except BaseException:
            connection.close()
            self.close()
            raise
        with self.lock:
            if self.alive:
                self._idle.append(connection)
                return reply
        connection.close()
        return reply

    def hold(self) -> None:
        """Something of the arena is about to be used, until `let_go`. Raises WireError over a broken link."""
        with self.lock:
            if not self.alive:
                raise wire.WireError("the daemon is gone")
            self._in_use += 1

    def let_go(self) -> None:
        """What was held is used no more."""
        with self.lock:
            self._in_use -= 1
            unused = not self.alive and not self._in_use
        if unused:
            self.when_unused(self)

    def close(self) -> None:
        """Give the session up. Blocks that are in use stay readable: the mapping lives as long as they do."""
        with self.lock:
            unused = self.alive and not self._in_use
            self.alive = False
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if unused:
            self.when_unused(self)

    def _take(self, timeout: float) -> socket.socket:
        with self.lock:
            if not self.alive:
                raise wire.WireError("the daemon is gone")
            if self._idle:
                return self._idle.pop()
        return self._greet(min(timeout, CALL_SECONDS))[0]

    def _greet(self, seconds: float) -> tuple[socket.socket, messages.Welcome, int | None]:
        connection = self._dial()
        try:
            until = time.monotonic() + seconds
            connection.settimeout(seconds)
            wire.send_request(connection, messages.Hello(messages.VERSION, self._client, self.session))
            boot, reply, fd = wire.receive_reply(connection, until)
            if isinstance(reply, messages.Refused):
                raise wire.WireError(reply.reason)
            if not isinstance(reply, messages.Welcome):
                raise wire.WireError(f"the daemon greeted with {type(reply).__name__}")
            if self.boot and boot != self.boot:
                raise wire.WireError("another daemon answered")
            self.boot = boot
            return connection, reply, fd
        except BaseException:
            connection.close()
            raise
