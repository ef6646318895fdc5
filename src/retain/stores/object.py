"""The object store: one object is one object of S3, Google Cloud Storage or Azure, through obstore.

obstore is asynchronous underneath. One thread runs its loop; every call waits there no longer than its
deadline, and its retries (with jitter) end with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from retain.errors import ConfigError, MissingDependency, StoreUnavailable
from retain.stores.base import Buffer, Health, StoredObject, as_bytes, check_name, check_offset
from retain.stores.remote import DEADLINE_SECONDS, Call, Remote

T = TypeVar("T")

WAIT_SECONDS = 0.25
"""How long an answer is waited for, at the least: object stores take tens of milliseconds to begin it."""

PART_BYTES = 8 << 20
"""Objects larger than this are written and read in parts of it, several at a time."""

PARTS = 6
QUESTIONS = 64
"""Questions under way at a time: object stores have no batches of them."""

PAGE = 1000


class ObjectStore:
    """Objects in a bucket, below a prefix: s3://BUCKET[/PREFIX], gs://BUCKET, az://CONTAINER.

    Credentials come from where the vendor's tools have them (AWS_*, GOOGLE_*, AZURE_* variables, instance
    roles). `endpoint` is the URL of another server with the same interface, `region` its region.
    """

    kind = "object"
    writable = True
    lists = True

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        wait: float = WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        self._lib = _obstore()
        parts = urlsplit(url)
        self._prefix = parts.path.strip("/")
        self._store = _open(self._lib, parts.scheme, parts.netloc, endpoint, region, deadline)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        where = f"{parts.netloc}{parts.path}" + (f" at {endpoint}" if endpoint else "")
        self._remote = Remote(f"object store {where}", self._ping, wait=wait, deadline=deadline)
        self._remote.start()

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        path = self._path(name)
        parts = [part for part in map(as_bytes, chunks) if len(part)]
        size = sum(map(len, parts))
        # One buffer may go as it is; obstore would take others for a stream of unknown length.
        data: Any = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        multipart = size > PART_BYTES
        with self._remote.call(patient=True) as call:
            self._do(
                lambda: self._lib.put_async(
                    self._store,
                    path,
                    data,
                    use_multipart=multipart,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS,
                ),
                call,
                must_be=True,
            )

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        path = self._path(name)
        check_offset(offset)
        target = as_bytes(buffer)
        if not len(target):
            self._remote.check_open()
            return 0
        with self._remote.call() as call:
            return self._do(lambda: self._read(path, target, offset, call), call) or 0

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._remote.call() as call:
            return self._do(lambda: self._head(path), call, first=True)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        paths = [self._path(name) for name in names]

        async def ask() -> list[int | None]:
            gate = asyncio.Semaphore(QUESTIONS)

            async def one(path: str) -> int | None:
                async with gate:
                    return await self._or_none(self._head(path))

            return list(await asyncio.gather(*map(one, paths)))

        with self._remote.call() as call:
            # Every question has its own share of the wait, in as many rounds as there are.
            rounds = -(-len(paths) // QUESTIONS)
            found = self._do(ask, call, first=True, rounds=max(1, rounds)) or []
            return [size or None for size in found]

    def delete(self, name: str) -> bool:
        path = self._path(name)

        async def remove() -> bool:
            if await self._or_none(self._head(path)) is None:
                return False
            await self._lib.delete_async(self._store, path)
            return True

        with self._remote.call(patient=True) as call:
            return bool(self._do(remove, call))

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        """Servers do not tell which of many were there: all count as gone that no error names."""
        paths = [self._path(name) for name in names]

        async def remove() -> bool:
            await self._lib.delete_async(self._store, paths)
            return True

        if not paths:
            return []
        with self._remote.call(patient=True) as call:
            if self._do(remove, call):
                return [True] * len(paths)
        return [self.delete(name) for name in names]  # some were not there, and this server minds

    def scan(self) -> Iterator[StoredObject]:
        prefix = f"{self._prefix}/" if self._prefix else ""
        with self._remote.call(patient=True):
            pages = self._lib.list(self._store, prefix=self._prefix or None, chunk_size=PAGE)
        while True:
            with self._remote.call(patient=True) as call:
                page = self._do(lambda: _next(pages), call, must_be=True)
            if page is None:
                return
            for each in page:
                shard, _, name = each["path"].removeprefix(prefix).rpartition("/")
                try:
                    check_name(name)
                except ValueError:
                    continue
                if shard == name[:2]:
                    yield StoredObject(name, each["size"], each["last_modified"].timestamp())

    @property
    def wait(self) -> float:
        return self._remote.wait

    def health(self) -> Health:
        return self._remote.health()

    def close(self) -> None:
        self._remote.close()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._owner == os.getpid():
            loop.call_soon_threadsafe(loop.stop)

    def _path(self, name: str) -> str:
        shard = f"{check_name(name)[:2]}/{name}"
        return f"{self._prefix}/{shard}" if self._prefix else shard

    async def _head(self, path: str) -> int:
        return int((await self._lib.head_async(self._store, path))["size"])

    async def _read(self, path: str, target: memoryview, offset: int, call: Call) -> int:
        first = min(len(target), PART_BYTES)
        try:
            found = await asyncio.wait_for(
                self._lib.get_async(self._store, path, options={"range": (offset, offset + first)}), call.wait
            )
        except (ValueError, self._lib.exceptions.BaseError) as error:
            if isinstance(error, FileNotFoundError) or not await self._reaches(path, offset):
                return 0
            raise
        call.begins()
        data = await found.bytes_async()
        target[: len(data)] = memoryview(data)
        call.moved(len(data))
        size = min(len(target), int(found.meta["size"]) - offset)
        if len(data) >= size:
            return len(data)
        gate = asyncio.Semaphore(PARTS)

        async def part(at: int) -> None:
            stop = min(at + PART_BYTES, size)
            # The same version as the first part.
            options = {"range": (offset + at, offset + stop), "if_match": found.meta["e_tag"]}
            async with gate:
                piece = await (await self._lib.get_async(self._store, path, options=options)).bytes_async()
            if len(piece) != stop - at:
                raise StoreUnavailable(f"{self._remote.what} answers a range with {len(piece)} bytes")
            target[at:stop] = memoryview(piece)
            call.moved(len(piece))

        await asyncio.gather(*(part(at) for at in range(len(data), size, PART_BYTES)))
        return size

    async def _reaches(self, path: str, offset: int) -> bool:
        """Whether an object has a byte at `offset`: servers refuse ranges beyond the end in many ways."""
        size = await self._or_none(self._head(path))
        return size is not None and offset < size

    @staticmethod
    async def _or_none(question: Awaitable[int]) -> int | None:
        try:
            return await question
        except FileNotFoundError:
            return None

    def _do(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        call: Call,
        *,
        first: bool = False,
        rounds: int = 1,
        must_be: bool = False,
    ) -> T | None:
        """Run `work` on the loop's thread; None where it finds no object. `first`: its result is all that is
        waited for.
        """
        limit = min(rounds * call.wait, call.until - call.started) if first else call.until - call.started

        async def bounded() -> T:
            return await asyncio.wait_for(_awaited(work), limit)

        future = asyncio.run_coroutine_threadsafe(bounded(), self._running())
        try:
            # The loop keeps the time; it is given a moment more to say so.
            result = future.result(limit + 1.0)
        except FileNotFoundError as error:
            if must_be:
                raise StoreUnavailable(f"{self._remote.what}: {_first_line(error)}") from error
            result = None
        except (TimeoutError, asyncio.CancelledError) as error:
            future.cancel()
            raise StoreUnavailable(f"{self._remote.what} does not answer in time") from error
        except self._lib.exceptions.BaseError as error:
            raise StoreUnavailable(f"{self._remote.what}: {_first_line(error)}") from error
        call.begins()
        return result

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="retain-object", daemon=True).start()
            return self._loop

    def _ping(self, seconds: float) -> float:
        """Asks for an object that is not there: that takes the right to read, and no other."""
        call = Call(seconds, time.monotonic() + seconds)
        self._do(lambda: self._or_none(self._head(self._path("ping"))), call, first=True)
        started = time.monotonic()
        self._do(lambda: self._or_none(self._head(self._path("ping"))), call, first=True)
        return time.monotonic() - started


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


async def _next(pages: Any) -> Any:
    try:
        return await pages.__anext__()
    except StopAsyncIteration:
        return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(_ended(left))
    loop.close()


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _open(
    lib: Any, scheme: str, bucket: str, endpoint: str | None, region: str | None, deadline: float
) -> Any:
    if not bucket:
        raise ConfigError("an object store's address names a bucket: s3://BUCKET/PREFIX")
    from obstore.store import AzureStore, GCSStore, S3Store

    plain = endpoint is not None and endpoint.startswith("http://")
    client = {
        "timeout": timedelta(seconds=deadline),
        "connect_timeout": timedelta(seconds=min(5.0, deadline)),
    }
    options: dict[str, Any] = {
        "client_options": {**client, "allow_http": plain},
        "retry_config": {
            "max_retries": 4,
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=deadline),
        },
    }
    if endpoint is not None:
        options["endpoint"] = endpoint
    try:
        if scheme == "s3":
            if region is not None:
                options["region"] = region
            return S3Store(bucket, **options)
        if scheme == "gs":
            return GCSStore(bucket, **options)
        return AzureStore(bucket, **options)
    except Exception as error:
        raise ConfigError(f"the bucket {bucket!r} cannot be used: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise MissingDependency("an object tier needs obstore: pip install 'retain[object]'") from error
    return obstore
