"""The daemon's process: serves one Cache to many clients over a Unix socket.

A connection is a client's sign of life: when the last of a session closes, its leases end. A client that went
without a word may still be copying from or into the arena, so what it had in use stays untouched until its
process is known to be dead.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from retain.cache import Cache
from retain.errors import StoreError
from retain.stores.memory import MemoryStore

from . import messages, wire
from .desk import Desk, Session

log = logging.getLogger("retain.daemon")

SWEEP_SECONDS = 1.0
"""How often quarantined clients and the idle time are looked at, while there is anything to look at."""


BREATH_SECONDS = 0.1
"""How long nobody is let in after letting a client in has failed."""


class Server:
    """Serves `cache` on `listener` until stopped, or idle for `idle_seconds` (None: for ever)."""

    def __init__(self, cache: Cache, listener: socket.socket, *, idle_seconds: float | None = None) -> None:
        store = cache.tiers[0].store
        if not isinstance(store, MemoryStore) or store.fd is None:
            raise StoreError("the daemon needs an arena that it can share, and this system has no memfd")
        self.cache = cache
        self.desk = Desk(cache, store)
        self.boot = secrets.token_bytes(wire.BOOT_BYTES)
        self._store = store
        self._fd = store.fd
        self._listener = listener
        self._idle_seconds = idle_seconds
        self._quarantine: list[tuple[int, Session]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._last_used = time.monotonic()

    def serve(self) -> None:
        """Accept clients until `stop`; then close the cache."""
        threading.Thread(target=self._sweep, name="retain-sweep", daemon=True).start()
        log.info("the daemon serves, boot %s", self.boot.hex())
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stop.is_set():
                    break
                self.cache.failure("a client could not be let in", error)
                self._stop.wait(BREATH_SECONDS)  # out of descriptors, it may be: they will be back
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="retain-client", daemon=True
            ).start()
        self.cache.close()
        log.info("the daemon has ended")

    def stop(self) -> None:
        """End `serve`. Idempotent."""
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # connections

    def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            with connection:
                session = self._greet(connection)
                while session is not None and not self._stop.is_set():
                    request = wire.receive_request(connection)
                    if request is None:
                        break
                    self._last_used = time.monotonic()
                    reply = self.desk.answer(session, request)
                    if reply is not None:
                        wire.send_reply(connection, self.boot, reply)
                    if isinstance(request, messages.Stop):
                        self.stop()
                    if isinstance(request, messages.Unused):
                        self._end_quarantine(request.session, session.pid)
        except wire.WireError as error:
            log.info("a connection ended: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            if session is not None:
                self._leave(session)

    def _greet(self, connection: socket.socket) -> Session | None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        hello = wire.receive_request(connection)
        if hello is None:
            return None
        reason = None
        if uid not in (os.getuid(), 0):
            reason = f"this daemon serves user {os.getuid()}, not user {uid}"
        elif not isinstance(hello, messages.Hello):
            reason = "the first message of a connection is Hello"
        elif hello.version != messages.VERSION:
            reason = (
                f"this daemon speaks protocol version {messages.VERSION}, the client version {hello.version}"
            )
        if reason is not None or not isinstance(hello, messages.Hello):
            wire.send_reply(connection, self.boot, messages.Refused(reason or "no greeting"))
            return None
        client = hello.client[:80]
        session = self.desk.sessions.join(
            hello.session, lambda: Session(secrets.token_bytes(16), pid, client)
        )
        if session is None:
            wire.send_reply(connection, self.boot, messages.Refused("this session has ended"))
            return None
        tiers = [(tier.name, tier.kind, tier.capacity) for tier in self.cache.tiers]
        welcome = messages.Welcome(messages.VERSION, session.token, self._store.span, tiers)
        try:
            wire.send_reply(connection, self.boot, welcome, None if hello.session else self._fd)
        except wire.WireError:
            self._leave(session)
            raise
        return session

    def _leave(self, session: Session) -> None:
        pidfd = _pidfd(session.pid)
        with self._lock:
            if not self.desk.sessions.leave(session):
                _close(pidfd)
                return
            in_use = bool(session.loaded or session.places) and not session.orderly
            if in_use and pidfd is not None:
                self._quarantine.append((pidfd, session))
        self._last_used = time.monotonic()
        self.desk.leave(session)
        if in_use and pidfd is not None:
            log.info(
                "client %s left without a word: what it had in use waits for process %d to end or to let go",
                session.client,
                session.pid,
            )
            return
        _close(pidfd)
        self.desk.settle_up(session)

    def _end_quarantine(self, token: bytes, pid: int) -> None:
        """The process of a session that broke off has said that nothing of it is in use any more."""
        self._let_out(lambda pidfd, session: session.token == token and session.pid == pid)

    def _let_out(self, which: Callable[[int, Session], bool]) -> None:
        with self._lock:
            out = [each for each in self._quarantine if which(*each)]
            self._quarantine = [each for each in self._quarantine if each not in out]
        for pidfd, session in out:
            os.close(pidfd)
            self.desk.settle_up(session)

    def _sweep(self) -> None:
        while not self._stop.wait(
            SWEEP_SECONDS if self._quarantine or self._idle_seconds else 10 * SWEEP_SECONDS
        ):
            self._let_out(lambda pidfd, session: ended(pidfd))
            self.desk.expire()
            with self._lock:
                idle = not self.desk.sessions.all() and not self._quarantine
            if (
                idle
                and self._idle_seconds is not None
                and time.monotonic() - self._last_used > self._idle_seconds
                and not self.cache.demoter.pending
            ):
                log.info(
                    "idle for %.0f s: the daemon ends, the tiers below keep what they have",
                    self._idle_seconds,
                )
                self.stop()


def ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()  # select itself takes no descriptor over 1,023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _pidfd(pid: int) -> int | None:
    """A handle on a process, None when it is gone already."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
