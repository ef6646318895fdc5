"""A connection's bytes: chunks go out unjoined, bulk comes in without a copy, all within deadlines."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

_BUFFER = 16 << 10
_MOST_CHUNKS = 512  # below IOV_MAX of every system
_LONGEST_LINE = 64 << 10


class LinkBroken(OSError):
    """The other side closed the connection, or said what no such server says."""


class Link:
    """One connected socket, plain or TLS. Not safe from several threads.

    Every call takes `until`, a time of `time.monotonic`, and raises TimeoutError when that passes. Plain
    sockets are left blocking and the kernel keeps the time, so that one system call fills a whole buffer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._owed = 0
        self._timeouts: dict[int, int] = {}
        if not self._tls:
            sock.settimeout(None)

    def send(self, parts: Sequence[memoryview | bytes], until: float) -> None:
        """Send all parts, one after the other."""
        if self._tls:
            for part in parts:
                self.sock.settimeout(_left(until))
                self.sock.sendall(part)
            return
        left = list(parts)
        while left:
            self._limit(socket.SO_SNDTIMEO, until)
            try:
                sent = self.sock.sendmsg(left[:_MOST_CHUNKS])
            except BlockingIOError as error:
                raise TimeoutError("the data could not be sent in time") from error
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = memoryview(left[0])[sent:]

    def line(self, until: float) -> bytes:
        """The bytes up to the next CR LF, without it."""
        if self._owed:
            owed, self._owed = self._owed, 0
            self.skip(owed, until)
        seen = self._start
        while True:
            at = self._buffer.find(b"\r\n", max(self._start, seen - 1), self._end)
            if at >= 0:
                found = bytes(self._view[self._start : at])
                self._start = at + 2
                return found
            seen = self._end
            if self._end - self._start > _LONGEST_LINE:
                raise LinkBroken("the answer has a line without an end")
            seen -= self._make_space()
            self._end += self._receive(self._view[self._end :], until)

    def take(self, size: int, until: float) -> bytes:
        """The next `size` bytes, for small ones."""
        data = bytearray(size)
        self.fill(memoryview(data), until, until)
        return bytes(data)

    def fill(self, target: memoryview, until: float, stall: float) -> None:
        """Fill `target`. Raises TimeoutError also when no byte came for about `stall` seconds, if that is
        sooner.
        """
        ready = min(len(target), self._end - self._start)
        if ready:
            target[:ready] = self._view[self._start : self._start + ready]
            self._start += ready
        done = ready
        while done < len(target):
            now = time.monotonic()
            done += self._receive(target[done:], min(until, now + stall), whole=True)

    def skip(self, size: int, until: float) -> None:
        """Read and forget the next `size` bytes."""
        while size:
            if self._start == self._end:
                self._start = self._end = 0
                self._end = self._receive(self._view, until)
            step = min(size, self._end - self._start)
            self._start += step
            size -= step

    def owe(self, size: int) -> None:
        """The next `size` bytes are of no interest: they are read along with what comes after them."""
        self._owed = size

    def close(self) -> None:
        with suppress(OSError):
            self.sock.close()

    def _make_space(self) -> int:
        """Move what is unread to the front, and grow a full buffer; by how much it was moved."""
        moved = self._start
        if moved:
            size = self._end - moved
            self._buffer[:size] = self._buffer[moved : self._end]
            self._start, self._end = 0, size
        if self._end == len(self._buffer):
            grown = bytearray(2 * len(self._buffer))
            grown[: self._end] = self._buffer
            self._buffer, self._view = grown, memoryview(grown)
        return moved

    def _receive(self, target: memoryview, until: float, *, whole: bool = False) -> int:
        if self._tls:
            self.sock.settimeout(_left(until))
            got = self.sock.recv_into(target)
        else:
            self._limit(socket.SO_RCVTIMEO, until)
            try:
                got = self.sock.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
            except BlockingIOError as error:
                raise TimeoutError("no answer in time") from error
        if got == 0:
            raise LinkBroken("the connection was closed before the answer was complete")
        return got

    def _limit(self, option: int, until: float) -> None:
        milliseconds = max(1, int(_left(until) * 1000))
        if self._timeouts.get(option) != milliseconds:
            self._timeouts[option] = milliseconds
            seconds, rest = divmod(milliseconds, 1000)
            self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, rest * 1000))


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
