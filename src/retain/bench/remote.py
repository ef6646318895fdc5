"""Bench `store`, remote tiers: redis, http and object beside the bare clients and a raw loopback socket.

The servers are started here, where they are installed. CPU seconds are those of this process and of the
server together; except for object, whose test server is a Python program that would hide the clients.
"""

from __future__ import annotations

import http.client
import importlib.util
import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from retain.bench import services
from retain.bench.clock import Contender, Sample, interleaved
from retain.bench.pool import Pool
from retain.errors import MissingDependency
from retain.stores.base import Store
from retain.stores.disk import DiskStore

Measured = Iterator[tuple[str, str, Sample, Sample]]
WAIT_SECONDS = 10.0
"""The machine is busy, and nothing here is about dead servers."""

OBJECT_ROUNDS = 2

_RAW_SERVER = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
connection, _ = listening.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
data = bytes(int(sys.argv[1]))
while connection.recv(1):
    connection.sendall(data)
"""


def redis(pool: Pool, folder: Path, rounds: int) -> Measured:
    """Put and get beside redis-py, get beside a raw socket."""
    bare: Any = _module("redis", "redis")
    from retain.stores.redis import RedisStore

    with (
        services.redis_server(folder / "redis") as server,
        closing(RedisStore(f"redis://127.0.0.1:{server.port}", wait=WAIT_SECONDS)) as store,
        closing(bare.Redis(port=server.port)) as client,
    ):
        pid = server.process.pid
        names = pool.names("o")

        def put_bare(turn: int) -> None:
            for number in pool.turns(turn):
                client.set(f"bare{number}", pool.source[number].data)

        def get_bare(turn: int) -> None:
            for number in pool.turns(turn):
                client.get(names_bare[number])

        names_bare = [f"bare{number}" for number in range(pool.count)]
        found = interleaved(
            {"retain": Contender(_puts(store, pool, names)), "bare": Contender(put_bare)},
            rounds,
            servers=[pid],
        )
        yield "put", "redis-py", found["retain"], found["bare"]
        _fill(store, pool, names)
        for turn in range(pool.count // pool.batch):
            put_bare(turn)
        _check(store, names, pool)
        found = interleaved(
            {"retain": Contender(_gets(store, pool, names)), "bare": Contender(get_bare)},
            rounds,
            servers=[pid],
        )
        yield "get", "redis-py", found["retain"], found["bare"]
        yield "get", "raw socket", found["retain"], _raw(pool, rounds)


def http_(pool: Pool, folder: Path, rounds: int) -> Measured:
    """Get beside every client that is installed, of a disk tier's folder behind nginx."""
    from retain.stores.http import HttpStore

    root = folder / "origin"
    names = pool.names("o")
    with closing(DiskStore(root)) as disk:
        _fill(disk, pool, names)
    with (
        services.nginx(folder / "nginx", root) as server,
        closing(HttpStore(f"http://127.0.0.1:{server.port}", wait=WAIT_SECONDS)) as store,
    ):
        pid, port = server.process.pid, server.port
        _check(store, names, pool)
        urls = [f"http://127.0.0.1:{port}/{name[:2]}/{name}" for name in names]
        contenders = {"retain": Contender(_gets(store, pool, names))}
        for label, get in _http_clients(port):

            def work(turn: int, get: Callable[[str, memoryview], object] = get) -> None:
                for number in pool.turns(turn):
                    get(urls[number], pool.out.data)

            contenders[label] = Contender(work)
        found = interleaved(contenders, rounds, servers=[pid])
        mine = found.pop("retain")
        for label, sample in sorted(found.items(), key=lambda item: item[1].cpu_seconds):
            yield "get", label, mine, sample
        yield "get", "raw socket", mine, _raw(pool, rounds)
    shutil.rmtree(root)


def object_(pool: Pool, folder: Path, rounds: int) -> Measured:
    """Put and get beside obstore itself; CPU seconds of this process alone."""
    lib: Any = _module("obstore", "object")
    rounds = min(rounds, OBJECT_ROUNDS)
    _module("moto", "dev")
    from retain.stores.object import ObjectStore

    with (
        services.s3_server(folder) as server,
        _environment(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION="us-east-1"),  # noqa: S106
    ):
        services.make_bucket(server.port, "bench")
        endpoint = f"http://127.0.0.1:{server.port}"
        names = pool.names("o")
        bare = lib.store.S3Store("bench", endpoint=endpoint, client_options={"allow_http": True})
        with closing(ObjectStore("s3://bench/kv", endpoint=endpoint, wait=WAIT_SECONDS)) as store:

            def put_bare(turn: int) -> None:
                for number in pool.turns(turn):
                    lib.put(bare, f"bare{number}", pool.source[number].tobytes())

            def get_bare(turn: int) -> None:
                for number in pool.turns(turn):
                    memoryview(lib.get(bare, f"bare{number}").bytes())

            found = interleaved(
                {"retain": Contender(_puts(store, pool, names)), "bare": Contender(put_bare)}, rounds
            )
            yield "put", "obstore", found["retain"], found["bare"]
            _fill(store, pool, names)
            for turn in range(pool.count // pool.batch):
                put_bare(turn)
            _check(store, names, pool)
            found = interleaved(
                {"retain": Contender(_gets(store, pool, names)), "bare": Contender(get_bare)}, rounds
            )
            yield "get", "obstore", found["retain"], found["bare"]


REMOTE: Mapping[str, Callable[[Pool, Path, int], Measured]] = {
    "redis": redis,
    "http": http_,
    "object": object_,
}


def _http_clients(port: int) -> Iterator[tuple[str, Callable[[str, memoryview], object]]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def with_http_client(url: str, out: memoryview) -> None:
        connection.request("GET", url[url.index("/", 8) :])
        answer: Any = connection.getresponse()
        done = 0
        while done < len(out) and (got := answer.readinto(out[done:])):
            done += got
        answer.read()

    yield "http.client, readinto", with_http_client
    if importlib.util.find_spec("httpx"):
        import httpx  # type: ignore[import-not-found,unused-ignore]

        client = httpx.Client()
        yield "httpx", lambda url, out: client.get(url).content
    if importlib.util.find_spec("pycurl"):
        import pycurl  # type: ignore[import-not-found,import-untyped,unused-ignore]

        curl = pycurl.Curl()

        def with_curl(url: str, out: memoryview) -> None:
            body = io.BytesIO()
            curl.setopt(pycurl.URL, url)
            curl.setopt(pycurl.WRITEDATA, body)
            curl.setopt(pycurl.BUFFERSIZE, 512 << 10)
            curl.perform()

        yield "pycurl", with_curl


def _raw(pool: Pool, rounds: int) -> Sample:
    """As many bytes over a loopback socket, from a process that does nothing but send them."""
    command = [sys.executable, "-c", _RAW_SERVER, str(pool.size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None:
                raise AssertionError("the server has no output")
            with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as connection:

                def get(turn: int) -> None:
                    for _ in pool.turns(turn):
                        connection.sendall(b"x")
                        done = 0
                        while done < pool.size:
                            done += connection.recv_into(pool.out.data[done:], 0, socket.MSG_WAITALL)

                return interleaved({"raw": Contender(get)}, rounds, servers=[server.pid])["raw"]
        finally:
            server.kill()


def _puts(store: Store, pool: Pool, names: list[str]) -> Callable[[int], None]:
    def put(turn: int) -> None:
        for number in pool.turns(turn):
            store.write(names[number], [pool.source[number].data])

    return put


def _gets(store: Store, pool: Pool, names: list[str]) -> Callable[[int], None]:
    def get(turn: int) -> None:
        for number in pool.turns(turn):
            store.read_into(names[number], pool.out.data)

    return get


def _fill(store: Store, pool: Pool, names: list[str]) -> None:
    for number, name in enumerate(names):
        store.write(name, [pool.source[number].data])


def _check(store: Store, names: list[str], pool: Pool) -> None:
    for number in (0, pool.count - 1):
        pool.out[:] = 0
        if store.read_into(names[number], pool.out.data) != pool.size or not np.array_equal(
            pool.out, pool.source[number]
        ):
            raise AssertionError(f"the {store.kind} store gave back {names[number]} with other bytes")


def _module(name: str, extra: str) -> object:
    if importlib.util.find_spec(name) is None:
        raise MissingDependency(f"this bench needs {name}: pip install 'retain[{extra}]'")
    return importlib.import_module(name)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
