"""The daemon's framing: length-prefixed msgpack messages over a Unix socket, described in docs/protocol.md.

A request is a 32-bit little-endian length and a message; a reply carries the daemon's boot id (8 bytes)
between the two. Nothing is ever unpickled.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time

import msgspec

from .messages import REPLIES, REQUESTS, VERSION, Reply, Request

MAX_MESSAGE_BYTES = 64 << 20
BOOT_BYTES = 8

_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The other side is gone, too slow, or does not speak this protocol."""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(REQUESTS)
_replies = msgspec.msgpack.Decoder(REPLIES)


def send_request(connection: socket.socket, request: Request) -> None:
    """Send a request. Raises WireError."""
    _send(connection, _frame(b"", request))


def send_reply(connection: socket.socket, boot: bytes, reply: Reply, fd: int | None = None) -> None:
    """Send a reply, with a file descriptor if one is given. Raises WireError."""
    data = _frame(boot, reply)
    if fd is None:
        _send(connection, data)
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        sent = connection.sendmsg([data], rights)
    except OSError as error:
        raise WireError(f"the connection broke: {error}") from error
    _send(connection, data[sent:])


def receive_request(connection: socket.socket) -> Request | None:
    """The next request; None when the client has closed the connection. Raises WireError."""
    head = _receive(connection, _LENGTH.size, end_allowed=True)
    if head is None:
        return None
    data = _receive(connection, _length(head, 0))
    try:
        return _requests.decode(data or b"")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a request of protocol version {VERSION}: {error}") from error


def receive_reply(connection: socket.socket, deadline: float) -> tuple[bytes, Reply, int | None]:
    """The daemon's next reply before `deadline` (monotonic): (boot id, reply, file descriptor). Raises
    WireError.
    """
    size = _LENGTH.size + BOOT_BYTES
    head, fd = _receive_with_fd(connection, size, deadline)
    try:
        data = _receive(connection, _length(head, BOOT_BYTES), deadline=deadline)
        reply: Reply = _replies.decode(data or b"")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _close(fd)
        raise WireError(f"not a reply of protocol version {VERSION}: {error}") from error
    except BaseException:
        _close(fd)
        raise
    return head[_LENGTH.size :], reply, fd


def _frame(boot: bytes, message: Request | Reply) -> bytes:
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a message of {len(data)} bytes is too long; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return _LENGTH.pack(len(boot) + len(data)) + boot + data


def _length(head: bytes, boot: int) -> int:
    (length,) = _LENGTH.unpack_from(head)
    if not boot < length <= MAX_MESSAGE_BYTES + BOOT_BYTES:
        raise WireError(f"a message claims {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return int(length) - boot


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise WireError(f"the connection broke: {error}") from error


def _receive(
    connection: socket.socket, size: int, *, end_allowed: bool = False, deadline: float | None = None
) -> bytes | None:
    buffer = bytearray(size)
    view = memoryview(buffer)
    at = 0
    while at < size:
        try:
            _set_deadline(connection, deadline)
            got = connection.recv_into(view[at:])
        except OSError as error:
            raise WireError(f"no answer: {error}") from error
        if got == 0:
            if at == 0 and end_allowed:
                return None
            raise WireError("the other side closed the connection")
        at += got
    return bytes(buffer)


def _receive_with_fd(connection: socket.socket, size: int, deadline: float) -> tuple[bytes, int | None]:
    space = socket.CMSG_SPACE(array.array("i").itemsize)
    try:
        _set_deadline(connection, deadline)
        data, rights, flags, _ = connection.recvmsg(size, space)
    except OSError as error:
        raise WireError(f"no answer: {error}") from error
    fd: int | None = None
    for level, kind, content in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(content) >= 4:
            received = array.array("i", content[: len(content) // 4 * 4])
            fd = received[0]
            for extra in received[1:]:
                os.close(extra)
    if not data or flags & socket.MSG_CTRUNC:
        _close(fd)
        raise WireError("the other side closed the connection")
    try:
        rest = _receive(connection, size - len(data), deadline=deadline) if len(data) < size else b""
    except BaseException:
        _close(fd)
        raise
    return data + (rest or b""), fd


def _set_deadline(connection: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
