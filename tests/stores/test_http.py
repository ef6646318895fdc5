"""The http store keeps the contract, over nginx and over a Retain origin, and survives what origins do."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from retain.daemon.holdings import StoreHoldings
from retain.daemon.origin import OriginHandler, serve
from retain.errors import ConfigError, StoreUnavailable
from retain.stores.base import Buffer, Shared, Store, StoredObject
from retain.stores.disk import DiskStore
from retain.stores.http import HttpStore
from retain.testing.store import StoreConformance, read
from tests.stores.servers import Proxy, Running, certificate, free_port, nginx

CALM: Any = {"wait": 10.0}
TOKEN = "a-long-secret"


@contextlib.contextmanager
def origin(
    store: Store, token: str | None = TOKEN, cert: tuple[Path, Path] | None = None
) -> Iterator[tuple[str, int]]:
    """A Retain origin over a store: its scheme and port."""
    fields = {"holdings": StoreHoldings(store), "token": token}
    handler = type("Handler", (OriginHandler,), fields)
    files: Any = {} if cert is None else {"cert": str(cert[0]), "key": str(cert[1])}
    server = serve(handler, **files)
    try:
        yield "http" if cert is None else "https", server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class TestRetainOrigin(StoreConformance):
    persistent = True
    examples = 15

    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        self._known: dict[Path, int] = {}
        with contextlib.ExitStack() as self._stack:
            yield

    def make_store(self, directory: Path) -> Store:
        if directory not in self._known:
            disk = self._stack.enter_context(contextlib.closing(DiskStore(directory / "objects")))
            self._known[directory] = self._stack.enter_context(origin(disk))[1]
        url = f"http://127.0.0.1:{self._known[directory]}/kv"
        return HttpStore(url, token=TOKEN, writable=True, **CALM)


class Published:
    """Written to a folder, read from the server over it."""

    kind = "http"

    def __init__(self, folder: Path, url: str) -> None:
        self.disk = DiskStore(folder)
        self.http = HttpStore(url, **CALM)

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        self.disk.write(name, chunks)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        return self.http.read_into(name, buffer, offset)

    def size(self, name: str) -> int | None:
        return self.http.size(name)

    def delete(self, name: str) -> bool:
        return self.disk.delete(name)

    def scan(self) -> Iterator[StoredObject]:
        return self.disk.scan()

    def close(self) -> None:
        self.disk.close()
        self.http.close()


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    root = tmp_path_factory.mktemp("root")
    with nginx(tmp_path_factory.mktemp("nginx"), root) as found:
        yield found, root


class TestNginx(StoreConformance):
    """A disk tier's folder behind nginx."""

    persistent = True
    examples = 15

    @pytest.fixture(autouse=True)
    def server(self, web: tuple[Running, Path]) -> None:
        self._web, self._root = web

    def make_store(self, directory: Path) -> Store:
        place = self._root / directory.relative_to("/")
        return Published(place, f"http://127.0.0.1:{self._web.port}{directory}")


@pytest.fixture
def published(web: tuple[Running, Path], tmp_path: Path) -> tuple[DiskStore, str, int]:
    server, root = web
    return DiskStore(root / tmp_path.relative_to("/")), str(tmp_path), server.port


def test_it_is_a_shared_store_that_is_only_read(published: tuple[DiskStore, str, int]) -> None:
    _, path, port = published
    with contextlib.closing(HttpStore(f"http://127.0.0.1:{port}{path}")) as store:
        assert isinstance(store, Shared)
        assert not store.writable
        with pytest.raises(StoreUnavailable, match="write=yes"):
            store.write("object", [b"data"])
        with pytest.raises(StoreUnavailable, match="write=yes"):
            store.delete("object")


@pytest.mark.parametrize("kind", ["nginx", "retain"])
def test_many_sizes_are_asked_in_one_round_trip(kind: str, published: tuple[DiskStore, str, int]) -> None:
    disk, path, port = published
    for number in range(0, 60, 2):
        disk.write(f"o{number}", [b"x" * (number + 1)])
    with contextlib.ExitStack() as stack:
        if kind == "retain":
            path, port = "/kv", stack.enter_context(origin(disk, token=None))[1]
        proxy = stack.enter_context(Proxy(port))
        store = stack.enter_context(
            contextlib.closing(HttpStore(f"http://127.0.0.1:{proxy.port}{path}", **CALM))
        )
        settled(store, "up")
        assert store.sizes(["o0"]) == [1]
        before = proxy.connections
        proxy.delay = 0.1
        started = time.monotonic()
        sizes = store.sizes([f"o{number}" for number in range(60)])
        assert time.monotonic() - started < 1.0
        assert sizes == [number + 1 if number % 2 == 0 else None for number in range(60)]
        assert proxy.connections - before == 0, "the connection is used again"


def test_large_objects_are_read_in_parallel_ranges(published: tuple[DiskStore, str, int]) -> None:
    disk, path, port = published
    data = os.urandom((40 << 20) + 12345)
    disk.write("large", [data])
    with (
        Proxy(port) as proxy,
        contextlib.closing(HttpStore(f"http://127.0.0.1:{proxy.port}{path}", **CALM)) as store,
    ):
        assert read(store, "large") == data
        assert proxy.connections >= 3
        buffer = bytearray(30 << 20)
        assert store.read_into("large", memoryview(buffer), 5 << 20) == len(buffer)
        assert buffer == data[5 << 20 : 35 << 20]


def test_a_retain_origin_checks_the_token_and_speaks_tls(tmp_path: Path) -> None:
    cert = certificate(tmp_path)
    disk = DiskStore(tmp_path / "kv")
    with origin(disk, cert=cert) as (scheme, port):
        url = f"{scheme}://127.0.0.1:{port}/kv"
        store = HttpStore(url, token=TOKEN, writable=True, ca=str(cert[0]), **CALM)
        data = os.urandom(3_000_000)
        store.write("object", [data[:5], data[5:]])
        assert read(store, "object") == data
        assert disk.size("object") == len(data)
        store.close()
        for wrong in ("wrong", None):
            other = HttpStore(url, token=wrong, writable=True, ca=str(cert[0]))
            settled(other, "down")
            assert "401" in other.health().reason
            assert "token" in other.health().reason
            other.close()
        stranger = HttpStore(url, token=TOKEN)
        settled(stranger, "down")
        assert "certificate" in stranger.health().reason.lower()
        stranger.close()


def test_without_a_token_an_origin_takes_nothing(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "kv")
    disk.write("object", [b"data"])
    with origin(disk, token=None) as (_, port):
        store = HttpStore(f"http://127.0.0.1:{port}/kv", writable=True, **CALM)
        assert read(store, "object") == b"data"
        with pytest.raises(StoreUnavailable, match="403"):
            store.write("other", [b"data"])
        with pytest.raises(StoreUnavailable, match="403"):
            store.delete("object")
        assert read(store, "object") == b"data"
        store.close()


def test_an_origin_for_other_hosts_takes_a_token() -> None:
    with pytest.raises(ConfigError, match="takes a token"):
        serve(type("Handler", (OriginHandler,), {"token": None}), "0.0.0.0")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/kv", "no address of an origin"),
        ("http://", "no address of an origin"),
        ("http://user@host/kv", "has a user"),
        ("http://host:x/kv", "not a URL"),
        ("http://host/kv#a", "fragment"),
    ],
)
def test_a_wrong_address_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpStore(url)
    with pytest.raises(ConfigError, match="bearer token"):
        HttpStore("http://host", token="a b\r\nc")


# an origin that is down, hangs, or lies


def settled(store: HttpStore, state: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while store.health().state != state:
        assert time.monotonic() < deadline, store.health()
        time.sleep(0.01)


@pytest.mark.parametrize("status", [500, 503, 403, 401])
def test_a21_an_origin_that_refuses_is_unavailable_and_never_a_miss(
    status: int, web: tuple[Running, Path], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    extra = f"location / {{ return {status}; }} location = /retain.json {{ return 404; }}"
    with nginx(tmp_path / "nginx", root, extra=extra) as server:
        store = HttpStore(f"http://127.0.0.1:{server.port}", **CALM)
        settled(store, "up")
        for call in (lambda: store.sizes(["a", "b"]), lambda: store.read_into("a", memoryview(bytearray(9)))):
            with pytest.raises(StoreUnavailable, match=str(status)):
                call()
        with pytest.raises(StoreUnavailable, match=str(status)):
            store.size("a")
        assert store.health().state == "down"
        store.close()


def test_a_redirect_is_named_and_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with nginx(
        tmp_path / "nginx", root, extra="location /kv { return 301 https://elsewhere.example/; }"
    ) as server:
        store = HttpStore(f"http://127.0.0.1:{server.port}/kv", **CALM)
        with pytest.raises(StoreUnavailable, match=r"elsewhere\.example"):
            store.size("a")
        store.close()


@pytest.mark.parametrize("cut", [5, 200, 5000, 900_000])
def test_half_an_answer_is_a_failure_and_never_a_short_object(
    cut: int, published: tuple[DiskStore, str, int]
) -> None:
    disk, path, port = published
    disk.write("object", [b"x" * 1_000_000])
    with Proxy(port) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}{path}", **CALM)
        settled(store, "up")
        proxy.cut = proxy.passed + cut
        with pytest.raises(StoreUnavailable):
            store.read_into("object", memoryview(bytearray(1_000_000)))
        proxy.cut = None
        assert read(store, "object") == b"x" * 1_000_000
        store.close()


@pytest.mark.parametrize("way", ["refuse", "silent", "nobody"])
def test_a21_an_origin_that_is_not_there_costs_nothing_soon(
    way: str, published: tuple[DiskStore, str, int]
) -> None:
    with Proxy(published[2]) as proxy:
        if way != "nobody":
            setattr(proxy, way, True)
        store = HttpStore(f"http://127.0.0.1:{free_port() if way == 'nobody' else proxy.port}")
        settled(store, "down")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.sizes(["object"])
        assert time.monotonic() - started < 0.02
        if way != "nobody":
            setattr(proxy, way, False)
            settled(store, "up", 30)
        store.close()


def test_a21_an_origin_that_hangs_costs_little_until_the_breaker_opens(tmp_path: Path) -> None:
    root = tmp_path / "root"
    disk = DiskStore(root)
    disk.write("object", [b"x" * 100_000])
    with nginx(tmp_path / "nginx", root, extra="") as server, Proxy(server.port) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}")
        settled(store, "up")
        buffer = memoryview(bytearray(100_000))
        assert store.read_into("object", buffer) == 100_000
        proxy.silent = True
        taken = []
        for _ in range(8):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                store.read_into("object", buffer)
            taken.append(time.monotonic() - started)
        assert max(taken[:3]) < 0.4, taken
        assert max(taken[3:]) < 0.02, taken
        proxy.silent = False
        settled(store, "up", 30)
        assert store.read_into("object", buffer) == 100_000
        store.close()


def test_an_origin_that_was_started_again_is_found_again(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "kv")
    disk.write("object", [b"data"])
    with origin(disk, token=None) as (_, port), Proxy(port) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}/kv", **CALM)
        assert read(store, "object") == b"data"
        proxy.reset()
        assert read(store, "object") == b"data", (
            "a kept connection that is dead is replaced without a failure"
        )
        store.close()


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    import socket

    disk = DiskStore(tmp_path / "kv")
    with origin(disk) as (_, port):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(
                f"PUT /kv/ob/object HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                "Content-Length: 1000\r\n\r\nhalf".encode()
            )
        time.sleep(0.2)
        assert list(disk.scan()) == []


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /kv/../../etc/passwd HTTP/1.1",
        "GET /kv/ob/../object HTTP/1.1",
        "GET /kv/xx/object HTTP/1.1",
        "GET /object HTTP/1.1",
        "POST /kv/sizes HTTP/1.1",
        "PUT /kv/.w/.writing HTTP/1.1\r\nContent-Length: 1",
        "GET /kv/ob/object HTTP/1.1\r\nRange: bytes=9-2",
        "garbage",
    ],
)
def test_an_origin_answers_nonsense_with_an_error_or_the_whole(tmp_path: Path, request_line: str) -> None:
    import socket

    disk = DiskStore(tmp_path / "kv")
    disk.write("object", [b"data"])
    with origin(disk) as (_, port):
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            raw.sendall(f"{request_line}\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            raw.settimeout(5)
            answer = raw.recv(65536)
        whole = "bytes=9-2" in request_line and answer.startswith(b"HTTP/1.1 200")
        assert whole or answer.split(b" ")[1][:1] == b"4" or b"Error code: 400" in answer, answer
        assert b"root:" not in answer
        assert [each.name for each in disk.scan()] == ["object"]


def test_etags_say_whether_an_object_is_the_same(tmp_path: Path) -> None:
    import http.client

    disk = DiskStore(tmp_path / "kv")
    disk.write("object", [b"data"])
    with origin(disk, token=None) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def get(**headers: str) -> tuple[int, str, bytes]:
            connection.request(
                "GET", "/kv/ob/object", headers={n.replace("_", "-"): v for n, v in headers.items()}
            )
            with connection.getresponse() as answer:
                assert answer.status != 200 or "immutable" in (answer.headers["Cache-Control"] or "")
                return answer.status, answer.headers.get("ETag", ""), answer.read()

        status, etag, body = get()
        assert (status, body) == (200, b"data")
        assert get(If_None_Match=etag)[0] == 304
        assert get(If_Match='"other"')[0] == 412
        assert get(Range="bytes=1-2")[2] == b"at"
        assert get(Range="bytes=-1")[2] == b"a"
        assert get(Range="bytes=9-")[0] == 416
        connection.close()


def test_many_readers_share_few_connections(published: tuple[DiskStore, str, int]) -> None:
    disk, path, port = published
    disk.write("object", [b"x" * 10_000])
    with Proxy(port) as proxy:
        store = HttpStore(f"http://127.0.0.1:{proxy.port}{path}", **CALM)
        settled(store, "up")

        def run() -> None:
            for _ in range(5):
                assert read(store, "object") == b"x" * 10_000

        threads = [threading.Thread(target=run) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert proxy.connections <= 20
        store.close()
