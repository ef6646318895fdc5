"""A proxy that spoils the way to a server: resets, halves, delay, little bandwidth, silence, statuses."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

PIECE = 4 << 10


@dataclass
class Proxy:
    """Passes bytes between its port and `target`, another port of the loopback. What it does may change at
    any time.

    `delay`: seconds that each piece from the server waits. `rate`: bytes a second in each direction, of all
    connections together. `cut`: pass so many bytes from the server, counted by `passed`, and then close every
    connection that more would come over; `half`: the same for each connection by itself. `refuse`: close at
    once. `silent`: accept, and pass nothing. `status`: answer every HTTP request with it instead of the
    server; `reset` when that begins.
    """

    target: int
    port: int = 0
    delay: float = 0.0
    rate: float | None = None
    cut: int | None = None
    half: int | None = None
    refuse: bool = False
    silent: bool = False
    status: int | None = None
    connections: int = 0
    passed: int = 0
    _open: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lanes: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.silent = False
        self.reset()

    def reset(self) -> None:
        """Cut every connection."""
        with self._lock:
            gone, self._open = self._open, set()
        for each in gone:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def clear(self) -> None:
        """Pass everything on again, over fresh connections where answers were made up here."""
        made_up = self.status is not None
        self.delay, self.rate, self.cut, self.half = 0.0, None, None, None
        self.refuse = self.silent = False
        self.status = None
        if made_up:
            self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            if self.refuse:
                near.close()
            elif self.status is not None:
                self._start(self._answer, near)
            else:
                try:
                    far = socket.create_connection(("127.0.0.1", self.target), 5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._start(self._join, near, far)

    def _start(self, work: object, *sockets: socket.socket) -> None:
        with self._lock:
            self._open.update(sockets)
        threading.Thread(target=self._work, args=(work, sockets), name="proxy", daemon=True).start()

    def _work(self, work: object, sockets: tuple[socket.socket, ...]) -> None:
        try:
            with suppress(OSError):
                work(*sockets)  # type: ignore[operator]
        finally:
            with self._lock:
                self._open.difference_update(sockets)
            for each in sockets:
                each.close()

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        other = threading.Thread(target=self._pass, args=(near, far, False), name="proxy", daemon=True)
        other.start()
        self._pass(far, near, True)
        other.join()

    def _pass(self, source: socket.socket, target: socket.socket, from_server: bool) -> None:
        here = 0
        with suppress(OSError):
            while data := source.recv(64 << 10):
                while self.silent:
                    time.sleep(0.01)
                if from_server:
                    with self._lock:
                        self.passed += len(data)
                    here += len(data)
                    if self.delay:
                        time.sleep(self.delay)
                    over = max(
                        0 if self.cut is None else self.passed - self.cut,
                        0 if self.half is None else here - self.half,
                    )
                    if over or (self.cut is not None and self.passed == self.cut):
                        target.sendall(data[: max(0, len(data) - over)])
                        break
                for at in range(0, len(data), PIECE):
                    if self.rate is None:
                        target.sendall(data[at:])
                        break
                    self._wait_turn(from_server, len(data[at : at + PIECE]) / self.rate)
                    target.sendall(data[at : at + PIECE])
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait_turn(self, lane: bool, seconds: float) -> None:
        with self._lock:
            start = max(time.monotonic(), self._lanes[lane])
            self._lanes[lane] = start + seconds
        time.sleep(max(0.0, start + seconds - time.monotonic()))

    def _answer(self, near: socket.socket) -> None:
        with near.makefile("rb") as requests:
            while (status := self.status) is not None and (line := requests.readline(64 << 10)):
                length = 0
                while (head := requests.readline(64 << 10)) not in (b"\r\n", b"\n", b""):
                    name, _, value = head.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                while length:
                    got = len(requests.read(min(length, 1 << 20)))
                    if not got:
                        return
                    length -= got
                body = b"" if line.startswith(b"HEAD ") else b"made up by a proxy\n"
                near.sendall(
                    b"HTTP/1.1 %d Made Up\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
                )
