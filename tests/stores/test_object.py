"""The object store keeps the contract over a real S3 server, and survives what servers do."""

from __future__ import annotations

import contextlib
import http.client
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from retain.errors import ConfigError, StoreUnavailable
from retain.stores.base import Shared, Store
from retain.testing.store import StoreConformance, read
from tests.stores.servers import Proxy, Running, free_port

pytest.importorskip("obstore")
from retain.stores.object import ObjectStore

CALM: Any = {"wait": 20.0}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(scope="session")
def bucket(s3: Running) -> str:
    name = f"kv-{secrets.token_hex(4)}"
    connection = http.client.HTTPConnection("127.0.0.1", s3.port, timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    return name


class TestS3(StoreConformance):
    persistent = True
    examples = 4
    race_seconds = 0.5
    largest = 20 << 20

    @pytest.fixture(autouse=True)
    def server(self, s3: Running, bucket: str) -> None:
        self._port, self._bucket = s3.port, bucket

    def make_store(self, directory: Path) -> Store:
        return ObjectStore(
            f"s3://{self._bucket}/{directory.relative_to('/')}",
            endpoint=f"http://127.0.0.1:{self._port}",
            **CALM,
        )


def store_at(bucket: str, port: int, prefix: str, **options: Any) -> ObjectStore:
    return ObjectStore(f"s3://{bucket}/{prefix}", endpoint=f"http://127.0.0.1:{port}", **(CALM | options))


def test_it_is_a_shared_store(s3: Running, bucket: str) -> None:
    with contextlib.closing(store_at(bucket, s3.port, "shared")) as store:
        assert isinstance(store, Shared)


def test_many_sizes_are_asked_side_by_side(s3: Running, bucket: str) -> None:
    with contextlib.closing(store_at(bucket, s3.port, "sizes")) as store:
        for number in range(0, 100, 10):
            store.write(f"o{number}", [b"x" * (number + 1)])
        assert store.sizes([f"o{n}" for n in range(100)]) == [
            n + 1 if n % 10 == 0 else None for n in range(100)
        ]


def settled(store: ObjectStore, state: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while store.health().state != state:
        assert time.monotonic() < deadline, store.health()
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["nobody", "refuse", "silent"])
def test_a21_a_server_that_is_not_there_costs_nothing_soon(way: str, s3: Running, bucket: str) -> None:
    with Proxy(s3.port) as proxy:
        if way != "nobody":
            setattr(proxy, way, True)
        port = free_port() if way == "nobody" else proxy.port
        with contextlib.closing(store_at(bucket, port, "down", wait=0.25, deadline=5.0)) as store:
            settled(store, "down")
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                store.sizes(["object"])
            assert time.monotonic() - started < 0.02


def test_a21_a_bucket_that_is_not_there_is_a_miss_or_named(s3: Running) -> None:
    with contextlib.closing(store_at("no-such-bucket", s3.port, "x")) as store:
        with contextlib.suppress(StoreUnavailable):
            assert store.size("object") is None
        with pytest.raises(StoreUnavailable):
            store.write("object", [b"data"])


@pytest.mark.parametrize("cut", [100, 5000, 900_000])
def test_half_an_answer_is_never_a_short_object(cut: int, s3: Running, bucket: str) -> None:
    with contextlib.closing(store_at(bucket, s3.port, "half")) as writer:
        writer.write("object", [b"x" * 1_000_000])
    with (
        Proxy(s3.port) as proxy,
        contextlib.closing(store_at(bucket, proxy.port, "half", deadline=8.0)) as store,
    ):
        settled(store, "up")
        proxy.cut = proxy.passed + cut
        buffer = bytearray(1_000_000)
        try:
            assert store.read_into("object", memoryview(buffer)) == 1_000_000
            assert buffer == b"x" * 1_000_000
        except StoreUnavailable:
            pass
        proxy.cut = None
        assert read(store, "object") == b"x" * 1_000_000


def test_an_address_without_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a bucket"):
        ObjectStore("s3:///prefix")
