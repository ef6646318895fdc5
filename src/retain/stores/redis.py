"""The redis store: one object is one string value, in Redis or Valkey; a single node, Sentinel or Cluster.

redis-py makes the connections (TLS, ACL, Sentinel, the map of a cluster). The values go around it: straight
from the socket into the caller's buffer, and from the caller's chunks into the socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Buffer, Health, StoredObject, as_bytes, check_name, check_offset
from retain.stores.link import Link, LinkBroken
from retain.stores.redis_nodes import Pool, errors_of_redis, shown, topology
from retain.stores.remote import DEADLINE_SECONDS, WAIT_SECONDS, Call, Remote

T = TypeVar("T")

MOST_BYTES = 512 << 20
"""The largest value of a server in its default configuration (proto-max-bulk-len)."""

SCANNED = 1000
"""Keys asked for in one step of a scan."""


class RedisStore:
    """Objects in the server at `url`, under keys that begin with `prefix`.

        redis://[USER@]HOST[:PORT][/DB]                    rediss:// for TLS
        redis+unix:///PATH/TO/SOCKET
        redis+sentinel://HOST[:PORT],HOST/SERVICE[/DB]     rediss+sentinel://
        redis+cluster://HOST[:PORT],HOST                   rediss+cluster://

    `ca`, `cert` and `key` are files for TLS. What the server evicts is a miss; what it has no room for raises
    StoreFull. The server keeps no times: a scan tells when an object was last used.
    """

    kind = "redis"
    writable = True
    lists = False

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "retain:",
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        wait: float = WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._prefix = prefix.encode()
        secure = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
        self._topology = topology(url, password, {name: v for name, v in secure.items() if v is not None})
        self._remote = Remote(f"redis at {shown(url)}", self._ping, wait=wait, deadline=deadline)
        self._remote.start()

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        key = self._key(name)
        parts = [part for part in map(as_bytes, chunks) if len(part)]
        size = sum(map(len, parts))
        if size > MOST_BYTES:
            raise StoreFull(f"the object {name} has {size} bytes; one value has {MOST_BYTES} at the most")

        def speak(link: Link, call: Call) -> None:
            # The head by itself: the server then reads the value into its place, which saves it a third.
            link.send([b"%b$%d\r\n" % (_command(b"SET", key, more=1), size)], call.until)
            link.send([*parts, b"\r\n"], call.until)
            reply = link.line(call.until)
            call.begins()
            if reply != b"+OK":
                raise _refusal(reply)

        with self._remote.call(patient=True) as call:
            self._talk(lambda: self._topology.route(key), speak, call)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        key = self._key(name)
        check_offset(offset)
        target = as_bytes(buffer)
        if not len(target):
            self._remote.check_open()
            return 0

        def speak(link: Link, call: Call) -> int:
            # GETRANGE never answers with more than there is room for, GET might.
            last = b"%d" % (offset + len(target) - 1)
            link.send([_command(b"GETRANGE", key, b"%d" % offset, last)], call.answer_by)
            size = _bulk(link.line(call.answer_by))
            call.begins()
            if not 0 <= size <= len(target):
                raise LinkBroken(f"the server answers a range of {len(target)} bytes with {size}")
            link.fill(target[:size], call.until, call.wait)
            link.owe(2)
            call.moved(size)
            return size

        with self._remote.call() as call:
            try:
                return self._talk(lambda: self._topology.route(key), speak, call)
            except _WrongType:
                return 0

    def size(self, name: str) -> int | None:
        key = self._key(name)
        # STRLEN alone cannot tell an empty object from none.
        exists, size = self._ask([(key, _command(b"EXISTS", key)), (key, _command(b"STRLEN", key))])
        return size if exists else None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        keys = [self._key(name) for name in names]
        return [size or None for size in self._ask([(key, _command(b"STRLEN", key)) for key in keys])]

    def delete(self, name: str) -> bool:
        key = self._key(name)
        return self._ask([(key, _command(b"UNLINK", key))]) == [1]

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        keys = [self._key(name) for name in names]
        return [gone == 1 for gone in self._ask([(key, _command(b"UNLINK", key)) for key in keys])]

    def scan(self) -> Iterator[StoredObject]:
        pattern = b"".join(b"\\" + bytes([c]) if c in b"*?[]\\" else bytes([c]) for c in self._prefix) + b"*"
        with self._remote.call(patient=True):
            pools = self._topology.primaries()
        seen: set[bytes] = set()
        for pool in pools:
            cursor = b"0"
            while True:
                cursor, keys = self._scan_step(pool, cursor, pattern)
                fresh = [key for key in dict.fromkeys(keys) if key not in seen]
                seen.update(fresh)
                yield from self._described(fresh)
                if cursor == b"0":
                    break

    @property
    def wait(self) -> float:
        return self._remote.wait

    def health(self) -> Health:
        return self._remote.health()

    def close(self) -> None:
        self._remote.close()
        self._topology.close()

    def _key(self, name: str) -> bytes:
        return self._prefix + check_name(name).encode()

    def _described(self, keys: Sequence[bytes]) -> Iterator[StoredObject]:
        # The idle time first, for asking for the size is a use.
        asked = [(key, _command(b"OBJECT", b"IDLETIME", key)) for key in keys]
        answers = self._ask([*asked, *((key, _command(b"STRLEN", key)) for key in keys)], patient=True)
        present = self._ask([(key, _command(b"EXISTS", key)) for key in keys], patient=True)
        now = time.time()
        rows = zip(keys, answers[: len(keys)], answers[len(keys) :], present, strict=True)
        for key, idle, size, there in rows:
            name = key[len(self._prefix) :].decode("ascii", "replace")
            with suppress(ValueError):
                if there and size is not None:
                    yield StoredObject(check_name(name), size, now - (idle or 0))

    def _scan_step(self, pool: Pool, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
        def speak(link: Link, call: Call) -> tuple[bytes, list[bytes]]:
            count = b"%d" % SCANNED
            link.send([_command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count)], call.until)
            if (reply := link.line(call.until)) != b"*2":
                raise _refusal(reply)
            following = _text(link, call.until)
            header = link.line(call.until)
            if header[:1] != b"*":
                raise _refusal(header)
            return following, [_text(link, call.until) for _ in range(int(header[1:]))]

        with self._remote.call(patient=True) as call:
            return self._talk(lambda: pool, speak, call)

    def _ask(self, commands: Sequence[tuple[bytes, bytes]], *, patient: bool = False) -> list[int | None]:
        """The numbers that (key, command) pairs are answered with, None for a key that holds no object; one
        round trip.
        """
        if not commands:
            self._remote.check_open()
            return []
        with self._remote.call(patient=patient) as call:
            answers: list[int | None] = [None] * len(commands)
            groups: dict[Pool, list[int]] = {}
            for index, (key, _) in enumerate(commands):
                groups.setdefault(self._topology.route(key), []).append(index)
            for pool, indices in groups.items():
                payload = b"".join(commands[index][1] for index in indices)

                def speak(link: Link, call: Call, payload: bytes = payload, count: int = len(indices)) -> Any:
                    link.send([payload], call.answer_by)
                    replies = []
                    for number in range(count):
                        reply = link.line(call.until if number else call.answer_by)
                        call.begins()
                        replies.append(reply)
                    return [_number(reply) for reply in replies]

                where = commands[indices[0]][0]
                # A pool is looked up again where a cluster has moved its slots.
                found = self._talk(
                    lambda pool=pool, where=where: pool if pool.open else self._topology.route(where),  # type: ignore[misc]
                    speak,
                    call,
                )
                for index, answer in zip(indices, found, strict=True):
                    answers[index] = answer
            return answers

    def _talk(self, pool_now: Callable[[], Pool], speak: Callable[[Link, Call], T], call: Call) -> T:
        """Have `speak` use a connection of the pool. Once more on a fresh one, where a kept one turns out to
        be dead or the server is not the one in charge any more.
        """
        try:
            for attempt in (1, 2):
                pool = pool_now()
                connection = pool.take()
                fresh = connection is None
                try:
                    if connection is None:
                        connection = pool.connect(call)
                    result = speak(connection.link, call)
                except _WrongType:
                    if connection is not None:
                        pool.give(connection)
                    raise
                except (_Moved, LinkBroken, ConnectionError) as error:
                    if connection is not None:
                        connection.close()
                    if attempt == 2 or (fresh and not isinstance(error, _Moved)):
                        raise
                    if isinstance(error, _Moved):
                        self._topology.refresh()
                    else:
                        pool.drain()
                except BaseException:
                    if connection is not None:
                        connection.close()
                    raise
                else:
                    if self._remote.up:
                        pool.give(connection)
                    else:
                        connection.close()
                    return result
        except errors_of_redis() as error:
            raise StoreUnavailable(f"{self._remote.what}: {error}") from error
        raise AssertionError("unreachable")

    def _ping(self, seconds: float) -> float:
        """Over a connection of its own: what is pinged for may be a password that was wrong."""
        call = Call(seconds, time.monotonic() + seconds)
        try:
            for pool in self._topology.primaries():
                connection = pool.connect(call)
                try:
                    started = time.monotonic()
                    connection.link.send([_command(b"PING")], call.until)
                    reply = connection.link.line(call.until)
                    if reply != b"+PONG":
                        raise _refusal(reply)
                    latency = time.monotonic() - started
                except BaseException:
                    connection.close()
                    raise
                pool.give(connection)
        except errors_of_redis() as error:
            with suppress(Exception):
                self._topology.refresh()
            raise StoreUnavailable(str(error)) from error
        return latency


class _Refused(StoreUnavailable):
    """The server answered with an error."""


class _Moved(_Refused):
    """Another server is in charge."""


class _WrongType(_Refused):
    """The key holds something that is no object."""


def _refusal(reply: bytes) -> Exception:
    """The error that a reply stands for."""
    text = reply.decode("utf-8", "replace")
    if text.startswith("-OOM"):
        return StoreFull(f"redis has no room: {text[1:]}")
    for kind, words in ((_Moved, ("-MOVED", "-ASK", "-READONLY")), (_WrongType, ("-WRONGTYPE",))):
        if text.startswith(words):
            return kind(text[1:])
    if text.startswith("-"):
        return _Refused(f"redis refuses: {text[1:]}")
    return LinkBroken(f"not an answer of redis: {text[:80]!r}")


def _command(*words: bytes, more: int = 0) -> bytes:
    """A command as the protocol has it; `more` words follow by other ways."""
    return b"*%d\r\n" % (len(words) + more) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _bulk(reply: bytes) -> int:
    if reply[:1] != b"$":
        raise _refusal(reply)
    return int(reply[1:])


def _text(link: Link, until: float) -> bytes:
    text = link.take(_bulk(link.line(until)), until)
    link.owe(2)
    return text


def _number(reply: bytes) -> int | None:
    if reply[:1] == b":":
        return int(reply[1:])
    if reply in (b"$-1", b"_") or reply.startswith((b"-WRONGTYPE", b"-ERR no such key", b"-ERR An LFU")):
        return None
    raise _refusal(reply)
