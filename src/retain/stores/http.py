"""The http store: objects below a URL, one file each, at `URL/ab/NAME`; read from any HTTP/1.1 origin.

A disk tier's folder behind a static file server is an origin. A Retain origin (retain.daemon.origin) tells by
`URL/retain.json` that it answers questions about many objects at once, and lists, takes and deletes them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote

from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Buffer, Health, StoredObject, as_bytes, check_name, check_offset
from retain.stores.http_link import Answer, HttpLink, Place
from retain.stores.link import LinkBroken
from retain.stores.remote import DEADLINE_SECONDS, WAIT_SECONDS, Call, Remote

T = TypeVar("T")

PART_BYTES = 16 << 20
"""Objects larger than this are read in parts of it, several at a time."""

PARTS = 4
PIPELINED = 64
"""Requests sent to an origin before their answers are read."""

SMALL_BYTES = 64 << 10
"""Up to this size a range is asked for; beyond it the whole object, which caches on the way know better."""

IDLE_CONNECTIONS = 16
MANIFEST = "retain.json"


class HttpStore:
    """Objects below `url`. `token` is sent as a bearer token; `ca` is a file of certificates to trust.

    With `writable` objects are uploaded by PUT and removed by DELETE: to a Retain origin, or to any that
    keeps nothing of an upload that breaks off (nginx with WebDAV). Listing takes a Retain origin.
    """

    kind = "http"
    lists = False

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        writable: bool = False,
        ca: str | None = None,
        wait: float = WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self.writable = writable
        self._place = Place.parse(url, token, ca)
        self._idle: list[HttpLink] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._batches: bool | None = None
        self._threads = ThreadPoolExecutor(PARTS, thread_name_prefix="retain-http")
        self._remote = Remote(f"http origin {self._place.shown}", self._ping, wait=wait, deadline=deadline)
        self._remote.start()

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        target = self._target(name)
        parts = [part for part in map(as_bytes, chunks) if len(part)]
        self._may_write()

        def speak(link: HttpLink, call: Call) -> None:
            size = sum(map(len, parts))
            link.send("PUT", target, call.until, body=parts, headers={"Content-Length": str(size)})
            answer = link.answer(call.until)
            call.begins()
            link.forget(answer, call.until)
            if answer.status in (413, 507):
                raise StoreFull(f"{self._remote.what} has no room for an object of {size} bytes")
            if answer.status not in (200, 201, 204):
                raise self._refused(answer)

        with self._remote.call(patient=True) as call:
            self._talk(speak, call)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        target = self._target(name)
        check_offset(offset)
        wanted = as_bytes(buffer)
        if not len(wanted):
            self._remote.check_open()
            return 0
        with self._remote.call() as call:
            if len(wanted) <= PART_BYTES:
                return self._talk(lambda link, call: self._read(link, call, target, wanted, offset)[0], call)
            return self._read_parts(call, target, wanted, offset)

    def size(self, name: str) -> int | None:
        target = self._target(name)

        def speak(link: HttpLink, call: Call) -> int | None:
            link.send("HEAD", target, call.answer_by)
            answer = link.answer(call.answer_by)
            call.begins()
            return self._size_of(answer)

        with self._remote.call() as call:
            return self._talk(speak, call)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        targets = [self._target(name) for name in names]
        with self._remote.call() as call:
            if self._batches and len(names) > 1:
                found = self._talk(lambda link, call: self._ask(link, call, names), call)
            else:
                found = []
                for at in range(0, len(targets), PIPELINED):
                    some = targets[at : at + PIPELINED]
                    found += self._talk(lambda link, call, some=some: self._heads(link, call, some), call)  # type: ignore[misc]
        return [size or None for size in found]

    def delete(self, name: str) -> bool:
        target = self._target(name)
        self._may_write()

        def speak(link: HttpLink, call: Call) -> bool:
            link.send("DELETE", target, call.until)
            answer = link.answer(call.until)
            call.begins()
            link.forget(answer, call.until)
            if answer.status not in (200, 204, 404, 410):
                raise self._refused(answer)
            return answer.status in (200, 204)

        with self._remote.call() as call:
            return self._talk(speak, call)

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        targets = [self._target(name) for name in names]
        self._may_write()
        gone: list[bool] = []
        with self._remote.call(patient=True) as call:
            for at in range(0, len(targets), PIPELINED):
                some = targets[at : at + PIPELINED]
                gone += self._talk(lambda link, call, some=some: self._deletes(link, call, some), call)  # type: ignore[misc]
        return gone

    def scan(self) -> Iterator[StoredObject]:
        after = ""
        while True:

            def speak(link: HttpLink, call: Call, after: str = after) -> bytes:
                link.send("GET", f"{self._place.path}/objects?after={quote(after)}", call.until)
                return self._body(link, call)

            with self._remote.call(patient=True) as call:
                lines = self._talk(speak, call).decode().splitlines()
            for line in lines:
                name, size, modified = line.split(" ")
                yield StoredObject(check_name(name), int(size), float(modified))
                after = name
            if not lines:
                return

    @property
    def wait(self) -> float:
        return self._remote.wait

    def health(self) -> Health:
        return self._remote.health()

    def close(self) -> None:
        self._remote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._drain()

    # answers

    def _read(
        self,
        link: HttpLink,
        call: Call,
        target: str,
        wanted: memoryview,
        offset: int,
        *,
        part: bool = False,
        etag: str = "",
    ) -> tuple[int, Answer]:
        """One GET: how many bytes came, and its answer. `etag` is the version that a part must be of."""
        ranged = part or offset > 0 or len(wanted) <= SMALL_BYTES
        headers = {"Range": f"bytes={offset}-{offset + len(wanted) - 1}"} if ranged else {}
        if etag:
            headers["If-Match"] = etag
        link.send("GET", target, call.answer_by, headers=headers)
        answer = link.answer(call.answer_by)
        call.begins()
        if answer.status in (404, 410, 416):
            link.forget(answer, call.until)
            return 0, answer
        if answer.status not in (200, 206):
            link.forget(answer, call.until)
            raise self._refused(answer)
        if answer.length is None:
            raise LinkBroken("the origin does not say how long its answer is")
        if answer.status == 206 and answer.first_byte != offset:
            raise LinkBroken(f"the origin answers with another range: {answer.headers.get('content-range')}")
        skipped = min(offset, answer.length) if answer.status == 200 else 0
        link.skip(skipped, call.until)
        size = min(len(wanted), answer.length - skipped)
        link.fill(wanted[:size], call.until, max(call.wait, self._remote.wait))
        call.moved(size)
        link.leave(answer.length - skipped - size)
        return size, answer

    def _read_parts(self, call: Call, target: str, wanted: memoryview, offset: int) -> int:
        """Several ranges at a time, all of the version that the first is of."""
        first, answer = self._talk(
            lambda link, call: self._read(link, call, target, wanted[:PART_BYTES], offset, part=True), call
        )
        etag = answer.headers.get("etag", "")
        total = answer.total - offset if answer.total is not None else None
        if first < PART_BYTES or total is None or total <= first:
            return first
        size = min(len(wanted), total)
        if not etag or etag.startswith("W/"):
            # Nothing says that parts are of one version, so the whole is read as one.
            return self._talk(lambda link, call: self._read(link, call, target, wanted, offset)[0], call)

        def part(at: int) -> int:
            piece = wanted[at : min(at + PART_BYTES, size)]
            return self._talk(
                lambda link, mine: self._read(link, mine, target, piece, offset + at, part=True, etag=etag)[
                    0
                ],
                Call(self._remote.wait, call.until),
            )

        starts = range(first, size, PART_BYTES)
        got = list(self._threads.map(part, starts))
        call.moved(sum(got))
        if first + sum(got) != size:
            raise LinkBroken("the object changed while it was read")
        return size

    def _heads(self, link: HttpLink, call: Call, targets: Sequence[str]) -> list[int | None]:
        """HEADs, sent in a row before the first answer is read."""
        for target in targets:
            link.put_off("HEAD", target)
        link.push(call.answer_by)
        found = []
        for number, _ in enumerate(targets):
            answer = link.answer(call.until if number else call.answer_by)
            call.begins()
            found.append(self._size_of(answer))
            if answer.closes and number + 1 < len(targets):
                raise LinkBroken("the origin closed the connection between requests")
        return found

    def _deletes(self, link: HttpLink, call: Call, targets: Sequence[str]) -> list[bool]:
        """DELETEs, sent in a row before the first answer is read."""
        for target in targets:
            link.put_off("DELETE", target)
        link.push(call.until)
        gone = []
        for number, _ in enumerate(targets):
            answer = link.answer(call.until)
            call.begins()
            link.forget(answer, call.until)
            if answer.status not in (200, 204, 404, 410):
                raise self._refused(answer)
            gone.append(answer.status in (200, 204))
            if answer.closes and number + 1 < len(targets):
                raise LinkBroken("the origin closed the connection between requests")
        return gone

    def _ask(self, link: HttpLink, call: Call, names: Sequence[str]) -> list[int | None]:
        body = "\n".join(names).encode()
        length = {"Content-Length": str(len(body))}
        link.send(
            "POST", f"{self._place.path}/sizes", call.answer_by, body=[memoryview(body)], headers=length
        )
        lines = self._body(link, call).split(b"\n")
        if len(lines) != len(names):
            raise LinkBroken(f"the origin answers {len(names)} questions with {len(lines)} lines")
        return [None if line == b"-" else int(line) for line in lines]

    def _body(self, link: HttpLink, call: Call) -> bytes:
        answer = link.answer(call.until)
        call.begins()
        if answer.status != 200 or answer.length is None:
            link.forget(answer, call.until)
            raise self._refused(answer)
        return link.take(answer.length, call.until)

    def _size_of(self, answer: Answer) -> int | None:
        if answer.status in (404, 410):
            return None
        if answer.status != 200 or answer.length is None:
            raise self._refused(answer)
        return answer.length

    def _refused(self, answer: Answer) -> StoreUnavailable:
        hint = ""
        if answer.status in (401, 403):
            hint = "; give a token that it accepts"
        if answer.status in (301, 302, 307, 308):
            hint = f" and points to {answer.headers.get('location', 'elsewhere')}; give that address"
        return StoreUnavailable(f"{self._remote.what} answers {answer.status} {answer.reason}{hint}")

    # connections

    def _target(self, name: str) -> str:
        return f"{self._place.path}/{check_name(name)[:2]}/{name}"

    def _may_write(self) -> None:
        self._remote.check_open()
        if not self.writable:
            raise StoreUnavailable(
                f"{self._remote.what} is only read; the tier's option write=yes changes that"
            )

    def _talk(self, speak: Callable[[HttpLink, Call], T], call: Call) -> T:
        """Have `speak` use a connection; once more on a fresh one, where a kept one turns out to be dead."""
        link = self._take()
        if link is not None:
            try:
                return self._use(link, speak, call)
            except (LinkBroken, ConnectionError):
                self._drain()  # those kept as long are as dead
        return self._use(HttpLink.connect(self._place, call.answer_by), speak, call)

    def _use(self, link: HttpLink, speak: Callable[[HttpLink, Call], T], call: Call) -> T:
        try:
            result = speak(link, call)
        except (StoreUnavailable, StoreFull):
            self._give(link)
            raise
        except BaseException:
            link.close()
            raise
        self._give(link)
        return result

    def _take(self) -> HttpLink | None:
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None

    def _give(self, link: HttpLink) -> None:
        with self._lock:
            if link.reusable and self._remote.up and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(link)
                return
        link.close()

    def _drain(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _ping(self, seconds: float) -> float:
        """Over a connection of its own; finds out what kind of origin it is."""
        until = time.monotonic() + seconds
        link = HttpLink.connect(self._place, until)
        try:
            started = time.monotonic()
            link.send("GET", f"{self._place.path}/{MANIFEST}", until)
            answer = link.answer(until)
            latency = time.monotonic() - started
            if answer.status == 401 or answer.status >= 500:
                raise self._refused(answer)
            told: object = None
            if answer.status == 200 and answer.length is not None and answer.length < SMALL_BYTES:
                with suppress(ValueError):
                    told = json.loads(link.take(answer.length, until))
            self._batches = isinstance(told, dict) and told.get("retain") == 1
            return latency
        finally:
            link.close()
