"""The daemon's protocol: length-prefixed msgpack messages over a Unix socket, described in docs/protocol.md.

A request is a 32-bit little-endian length and a message; a reply carries the daemon's boot id (8 bytes)
between the two. Messages are arrays that begin with the message's name. Nothing is ever unpickled.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time

import msgspec

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
BOOT_BYTES = 8

_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The other side is gone, too slow, or does not speak this protocol."""


class Request(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what a client sends."""


class OneWay(Request, frozen=True):
    """Base of what a client sends without waiting for a reply."""


class Reply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what the daemon answers."""


class Hello(Request, frozen=True):
    """The first message on a connection. `session` empty opens a session; else the connection joins it."""

    version: int
    client: str
    session: bytes


class Welcome(Reply, frozen=True):
    """The answer to Hello; a file descriptor of the arena comes with it when the session is new."""

    version: int
    session: bytes
    span: int
    tiers: list[tuple[str, str, int]]
    """Each tier's name, kind and capacity in bytes, in the order they are asked."""


class Refused(Reply, frozen=True):
    """The request was not carried out, and why."""

    reason: str


class Done(Reply, frozen=True):
    """The request was carried out; `value` is its count or truth."""

    value: int


class Model(Request, frozen=True):
    """Declare a model under a number of the client's; `header` is the metadata form of its ModelSpec."""

    number: int
    spec: ModelWire


class ModelWire(msgspec.Struct, array_like=True, frozen=True):
    """A ModelSpec; `layers` as in an object's header."""

    name: str
    architecture: str
    layers: str
    dtype: str
    kin: bytes
    variant: bytes
    adapter: bytes | None


class Lookup(Request, frozen=True):
    """Find the longest usable prefix of a chain, which the daemon remembers as the session's number `chain`:
    the first `keep` keys of its earlier chain number `base`, and `keys` (32 bytes each) behind them.
    """

    model: int
    chain: int
    base: int
    keep: int
    keys: bytes
    root: bytes
    block_tokens: int
    slice: str
    fidelity: str
    limit: int


class Candidate(msgspec.Struct, array_like=True, frozen=True):
    """A kept block that may continue the last full one: the reader compares the token ids (u32le)."""

    key: bytes
    tokens: bytes
    media: tuple[int, ...]
    tier: int
    size: int


class Found(Reply, frozen=True):
    """What a lookup found, leased under `lease`: for every full block its lowest tier and bytes, and
    candidates.

    `speeds` gives each tier's predicted seconds an object and seconds a byte, where they are known.
    """

    lease: int
    parts: list[tuple[int, int]]
    candidates: list[Candidate]
    speeds: dict[str, tuple[float, float]]


class Settle(OneWay, frozen=True):
    """The reader's decision: it will use `parts` full blocks and perhaps a candidate, `tokens` in all of
    `found`.

    With `tokens` 0 the lease ends.
    """

    lease: int
    parts: int
    candidate: int
    tokens: int
    found: int


class Load(Request, frozen=True):
    """Bring the settled blocks of a lease into the arena. With `end` the lease ends; else others load too."""

    lease: int
    model: int
    timeout: float
    end: bool


class Blocks(Reply, frozen=True):
    """Blocks in the arena, leased under `lease`: for each block its pieces, (offset, size) in bytes."""

    lease: int
    blocks: list[list[tuple[int, int]]]


class Release(OneWay, frozen=True):
    """End a lease."""

    lease: int


class Reserve(Request, frozen=True):
    """Ask for a place of `size` bytes for the raw object `name`."""

    name: str
    size: int


class Place(Reply, frozen=True):
    """The place's offset in the arena, or -1 and the reason why there is none."""

    offset: int
    reason: str


class Commit(Request, frozen=True):
    """The place of `name` is filled; the daemon verifies the object before anyone sees it."""

    name: str


class Kept(Reply, frozen=True):
    """A StoreResult."""

    kept: bool
    reason: str


class Abandon(OneWay, frozen=True):
    """Give a reserved place back."""

    name: str


class Missing(Request, frozen=True):
    """Which of the keys (32 bytes each) no tier can give in full."""

    model: int
    keys: bytes
    slice: str
    fidelity: str


class Indices(Reply, frozen=True):
    """Indices of keys."""

    values: list[int]


class Nearest(Request, frozen=True):
    """How far a chain of keys is kept, under any form, and what continues it there."""

    keys: bytes
    root: bytes


class Continuations(Reply, frozen=True):
    """The number of leading keys that are kept, and the token ids (u32le) of kept blocks behind the last."""

    depth: int
    tokens: list[bytes]


class Drop(Request, frozen=True):
    """Remove every object of these keys (32 bytes each)."""

    keys: bytes


class Clear(Request, frozen=True):
    """Remove everything, or what one tier or space holds."""

    tier: str | None
    space: bytes | None


class Removed(Reply, frozen=True):
    """How much was removed."""

    objects: int
    bytes: int


class Pin(Request, frozen=True):
    """Pin or unpin blocks by key (32 bytes each)."""

    keys: bytes
    pinned: bool


class Fly(Request, frozen=True):
    """Lead the computation of a block, or wait for who does."""

    key: bytes
    timeout: float


class Flying(Reply, frozen=True):
    """`number` names the flight of a leader, 0 for a follower; `landed` says that the leader finished in
    time.
    """

    number: int
    landed: bool


class Land(OneWay, frozen=True):
    """The leader of a flight is done."""

    number: int


class Flush(Request, frozen=True):
    """Wait until what was stored is written to the tiers below."""

    timeout: float


class Stats(Request, frozen=True):
    """Ask for the cache's state."""


class State(Reply, frozen=True):
    """The cache's state: counters, failures by reason, tiers as (name, kind, objects, bytes, capacity,
    leased, pinned, codec), pending writes, the daemon's process id, uptime in seconds, sessions.
    """

    counters: dict[str, int]
    failures: dict[str, int]
    tiers: list[tuple[str, str, int, int, int, int, int, str]]
    pending: int
    pid: int
    uptime: float
    sessions: int


class Count(OneWay, frozen=True):
    """Add to a counter."""

    name: str
    n: int


class Failure(OneWay, frozen=True):
    """Count and log a failure that a client saw."""

    reason: str
    detail: str


class Bye(OneWay, frozen=True):
    """The session closes in order: nothing of the arena is in use by it any more."""


class Stop(Request, frozen=True):
    """End the daemon."""


REQUESTS = (
    Hello | Model | Lookup | Settle | Load | Release | Reserve | Commit | Abandon | Missing | Nearest | Drop
    | Clear | Pin | Fly | Land | Flush | Stats | Count | Failure | Bye | Stop
)  # fmt: skip
REPLIES = (
    Welcome | Refused | Done | Found | Blocks | Place | Kept | Indices | Continuations | Removed | Flying
    | State
)  # fmt: skip

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
