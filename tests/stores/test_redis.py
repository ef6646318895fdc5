"""The redis store keeps the contract over every kind of deployment, and survives what servers do."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retain.errors import ConfigError, StoreFull, StoreUnavailable
from retain.stores.base import Shared, Store
from retain.stores.redis import RedisStore
from retain.testing.store import StoreConformance, read
from tests.stores.servers import Proxy, Running, certificate, free_port, program, redis_server, running

CALM: Any = {"wait": 10.0}
"""For tests of what comes back, not of how fast: the machine may be busy."""


def used_memory(port: int) -> int:
    text = subprocess.run(
        [program("redis-cli"), "-p", str(port), "info", "memory"], capture_output=True, text=True, check=True
    ).stdout
    return int(next(line for line in text.splitlines() if line.startswith("used_memory:")).split(":")[1])


def cli(port: int, *words: str) -> str:
    command = [program("redis-cli"), "-p", str(port), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class TestRedisStore(StoreConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def server(self, redis: Running) -> Iterator[None]:
        self._port = redis.port
        with contextlib.ExitStack() as self._servers:
            yield

    def make_store(self, directory: Path) -> Store:
        return RedisStore(f"redis://127.0.0.1:{self._port}", prefix=f"{directory}[*?]:", **CALM)

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        small = self._servers.enter_context(redis_server(directory / "redis"))
        cli(small.port, "config", "set", "maxmemory", str(used_memory(small.port) + capacity))
        return RedisStore(f"redis://127.0.0.1:{small.port}", **CALM)


class TestRedisCluster(StoreConformance):
    persistent = True
    examples = 10
    race_seconds = 0.5

    @pytest.fixture(scope="class")
    def cluster(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
        with contextlib.ExitStack() as stack:
            ports = []
            for number in range(3):
                folder = tmp_path_factory.mktemp(f"cluster{number}")
                # A cluster's bus listens 10,000 above the port.
                port = free_port()
                while port > 55_000:
                    port = free_port()
                stack.enter_context(redis_server(folder, "--cluster-enabled", "yes", port=port))
                ports.append(port)
            nodes = [f"127.0.0.1:{port}" for port in ports]
            cli(ports[0], "--cluster", "create", *nodes, "--cluster-yes")
            deadline = time.monotonic() + 30
            while any("cluster_state:ok" not in cli(port, "cluster", "info") for port in ports):
                assert time.monotonic() < deadline, "the cluster does not come together"
                time.sleep(0.1)
            yield ports

    @pytest.fixture(autouse=True)
    def server(self, cluster: list[int]) -> None:
        self._ports = cluster

    def make_store(self, directory: Path) -> Store:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports[:2])
        return RedisStore(f"redis+cluster://{hosts}", prefix=f"{directory}:", **CALM)


def test_it_is_a_shared_store(redis: Running) -> None:
    with contextlib.closing(RedisStore(f"redis://127.0.0.1:{redis.port}")) as store:
        assert isinstance(store, Shared)


def test_many_sizes_are_asked_in_one_round_trip(redis: Running) -> None:
    with Proxy(redis.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}", prefix="sizes:", **CALM)
        for number in range(0, 200, 2):
            store.write(f"o{number}", [b"x" * (number + 1)])
        proxy.delay = 0.05
        started = time.monotonic()
        sizes = store.sizes([f"o{number}" for number in range(200)])
        assert time.monotonic() - started < 0.5
        assert sizes == [number + 1 if number % 2 == 0 else None for number in range(200)]
        store.close()


def test_one_value_is_the_whole_truth_of_an_object(redis: Running) -> None:
    store = RedisStore(f"redis://127.0.0.1:{redis.port}", prefix="truth:", **CALM)
    store.write("object", [b"ab", b"c"])
    assert cli(redis.port, "keys", "truth:*") == "truth:object"
    assert cli(redis.port, "get", "truth:object") == "abc"
    cli(redis.port, "set", "truth:object", "abcdef")
    assert read(store, "object") == b"abcdef"
    store.close()


def test_a_key_that_is_no_object_is_none(redis: Running) -> None:
    store = RedisStore(f"redis://127.0.0.1:{redis.port}", prefix="foreign:", **CALM)
    cli(redis.port, "rpush", "foreign:list", "x")
    cli(redis.port, "set", "foreign:-a-", "x")
    assert list(store.scan()) == []
    assert store.size("list") is None
    assert store.sizes(["list"]) == [None]
    assert store.read_into("list", memoryview(bytearray(4))) == 0
    store.write("list", [b"data"])
    assert read(store, "list") == b"data"
    store.close()


def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--maxmemory-policy", "allkeys-lru") as server:
        cli(server.port, "config", "set", "maxmemory", str(used_memory(server.port) + (4 << 20)))
        store = RedisStore(f"redis://127.0.0.1:{server.port}", **CALM)
        names = [f"o{number}" for number in range(60)]
        for name in names:
            store.write(name, [name.encode() * 30_000])
        there = store.sizes(names)
        assert 0 < sum(size is not None for size in there) < 60
        for name, size in zip(names, there, strict=True):
            buffer = bytearray(200_000)
            assert store.read_into(name, memoryview(buffer)) in (0, size)
        store.close()


def test_a_value_larger_than_redis_takes_is_refused_as_full(redis: Running) -> None:
    store = RedisStore(f"redis://127.0.0.1:{redis.port}", **CALM)
    piece = bytes(64 << 20)
    with pytest.raises(StoreFull, match="one value"):
        store.write("object", [piece] * 9)
    store.close()


def test_a_unix_socket_is_a_place_too(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with redis_server(tmp_path / "redis", "--unixsocket", str(path)):
        store = RedisStore(f"redis+unix://{path}", **CALM)
        store.write("object", [b"data" * 100_000])
        assert read(store, "object") == b"data" * 100_000
        store.close()


def test_a_database_and_a_user_with_few_rights_suffice(redis: Running) -> None:
    rules = "on >secret ~few:* &* -@all +getrange +set +strlen +exists +unlink +scan +object|idletime +ping"
    rules += " +select"  # and not +client|setinfo, which servers before 7.2 do not know
    cli(redis.port, "acl", "setuser", "few", *rules.split())
    store = RedisStore(f"redis://few@127.0.0.1:{redis.port}/3", prefix="few:", password="secret", **CALM)
    store.write("object", [b"data"])
    assert read(store, "object") == b"data"
    assert [each.name for each in store.scan()] == ["object"]
    assert store.delete("object")
    store.close()
    other = RedisStore(f"redis://few@127.0.0.1:{redis.port}/3", prefix="other:", password="secret", **CALM)
    with pytest.raises(StoreUnavailable, match=r"NOPERM|permission"):
        other.write("object", [b"data"])
    other.close()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = certificate(folder)
    tls = ["--port", "0", "--tls-port", "PORT", "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    tls += ["--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no", "--requirepass", "secret"]
    with redis_server(folder / "redis", *tls) as server:
        yield server, cert


def test_tls_and_a_password(secure: tuple[Running, Path]) -> None:
    server, cert = secure
    store = RedisStore(f"rediss://127.0.0.1:{server.port}", password="secret", ca=str(cert), **CALM)
    data = bytes(range(256)) * 20_000
    store.write("object", [data[:7], data[7:]])
    assert read(store, "object") == data
    assert store.sizes(["object", "nothing"]) == [len(data), None]
    store.close()


@contextlib.contextmanager
def sentinel(folder: Path, conf: Path, port: int) -> Iterator[None]:
    command = [program("redis-server"), str(conf), "--sentinel", "--port", str(port), "--dir", str(folder)]
    with running(command, port, folder / "sentinel.log"):
        yield


def test_sentinel_names_the_server_in_charge(tmp_path: Path) -> None:
    with redis_server(tmp_path / "one") as one, redis_server(tmp_path / "two") as two:
        cli(two.port, "replicaof", "127.0.0.1", str(one.port))
        port = free_port()
        conf = tmp_path / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor kv 127.0.0.1 {one.port} 1\nsentinel down-after-milliseconds kv 300\n"
        )
        with sentinel(tmp_path, conf, port):
            store = RedisStore(f"redis+sentinel://127.0.0.1:{port}/kv", **CALM)
            store.write("object", [b"data"])
            assert cli(one.port, "get", "retain:object") == "data"
            deadline = time.monotonic() + 30
            while "slave" not in cli(two.port, "role") or cli(two.port, "get", "retain:object") != "data":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            while "num-other" not in cli(port, "sentinel", "master", "kv") or not cli(
                port, "sentinel", "replicas", "kv"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            cli(port, "sentinel", "failover", "kv")
            while "master" not in cli(two.port, "role"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # The old server may be asked until the sentinel's word has gone round.
            while True:
                with contextlib.suppress(StoreUnavailable):
                    store.write("later", [b"more"])
                    if cli(two.port, "get", "retain:later") == "more":
                        break
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert read(store, "object") == b"data"
            store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://:secret@host", "password does not belong"),
        ("redis://", "names no host"),
        ("redis://a,b", "several hosts"),
        ("redis://host/two", "number of a database"),
        ("redis+sentinel://host", "name of the service"),
        ("http://host", "known schemes"),
        ("redis://host:port", "no host"),
    ],
)
def test_a_wrong_address_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisStore(url)


def test_certificates_without_tls_are_refused() -> None:
    with pytest.raises(ConfigError, match="rediss"):
        RedisStore("redis://host", ca="/x")


# a server that is down, hangs, or lies


def settled(store: RedisStore, state: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while store.health().state != state:
        assert time.monotonic() < deadline, store.health()
        time.sleep(0.01)


def costs(store: RedisStore) -> float:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.sizes(["object"])
    return time.monotonic() - started


def test_a21_a_wrong_port_is_down_at_once_and_costs_nothing() -> None:
    store = RedisStore(f"redis://127.0.0.1:{free_port()}")
    settled(store, "down")
    assert "refused" in store.health().reason
    assert max(costs(store) for _ in range(20)) < 0.02
    store.close()


@pytest.mark.parametrize("way", ["refuse", "silent"])
def test_a21_a_remote_that_closes_or_says_nothing_is_down(redis: Running, way: str) -> None:
    with Proxy(redis.port) as proxy:
        setattr(proxy, way, True)
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}")
        assert costs(store) < 0.5
        settled(store, "down")
        assert costs(store) < 0.02
        setattr(proxy, way, False)
        settled(store, "up", 30)
        assert store.sizes(["nothing"]) == [None]
        store.close()


def test_a21_tls_expected_by_either_side_is_named(secure: tuple[Running, Path], redis: Running) -> None:
    server, cert = secure
    plain = RedisStore(f"redis://127.0.0.1:{server.port}", password="secret")
    settled(plain, "down")
    plain.close()
    tls = RedisStore(f"rediss://127.0.0.1:{redis.port}", ca=str(cert))
    settled(tls, "down")
    assert tls.health().reason, "an old redis takes a TLS greeting for a command and waits for its end"
    tls.close()
    stranger = RedisStore(f"rediss://127.0.0.1:{server.port}", password="secret")
    settled(stranger, "down")
    assert "certificate" in stranger.health().reason.lower()
    stranger.close()


def test_a21_a_wrong_password_is_named(secure: tuple[Running, Path]) -> None:
    server, cert = secure
    store = RedisStore(f"rediss://127.0.0.1:{server.port}", password="wrong", ca=str(cert))
    settled(store, "down")
    assert "WRONGPASS" in store.health().reason or "password" in store.health().reason.lower()
    store.close()


def test_a21_a_server_that_hangs_costs_little_until_the_breaker_opens_and_nothing_after(
    tmp_path: Path,
) -> None:
    with redis_server(tmp_path / "redis") as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}")
        settled(store, "up")
        store.write("object", [b"x" * 100_000])
        server.stop()
        buffer = memoryview(bytearray(100_000))
        taken = []
        for _ in range(10):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                store.read_into("object", buffer)
            taken.append(time.monotonic() - started)
        assert max(taken[:3]) < 0.3, taken
        assert max(taken[3:]) < 0.02, taken
        assert store.health().state == "down"
        server.go_on()
        settled(store, "up", 30)
        assert store.read_into("object", buffer) == 100_000
        store.close()


def test_a_server_that_was_started_again_is_found_again(tmp_path: Path) -> None:
    with redis_server(tmp_path / "one") as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}", **CALM)
        store.write("object", [b"data"])
    with redis_server(tmp_path / "two", port=server.port):
        assert store.size("object") is None, "a kept connection that is dead is replaced without a failure"
        store.write("object", [b"data"])
        assert read(store, "object") == b"data"
    store.close()


@pytest.mark.parametrize("cut", [3, 9, 5000, 900_000])
def test_half_an_answer_is_a_failure_and_never_a_short_object(redis: Running, cut: int) -> None:
    RedisStore(f"redis://127.0.0.1:{redis.port}", prefix="half:", **CALM).write("object", [b"x" * 1_000_000])
    with Proxy(redis.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}", prefix="half:", **CALM)
        settled(store, "up")
        proxy.cut = proxy.passed + cut
        with pytest.raises(StoreUnavailable):
            store.read_into("object", memoryview(bytearray(1_000_000)))
        proxy.cut = None
        assert read(store, "object") == b"x" * 1_000_000
        store.close()


def test_a_server_that_is_slow_but_steady_is_given_its_time(redis: Running) -> None:
    RedisStore(f"redis://127.0.0.1:{redis.port}", prefix="slow:", **CALM).write("object", [b"x" * 400_000])
    with Proxy(redis.port, rate=1e6) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}", prefix="slow:")
        settled(store, "up")
        assert store.read_into("object", memoryview(bytearray(400_000))) == 400_000
        assert 2e5 < (store.health().bandwidth or 0) < 2e6
        store.close()


def test_a_far_server_is_waited_for_by_its_own_measure(redis: Running) -> None:
    with Proxy(redis.port, delay=0.1) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}", prefix="far:")
        settled(store, "up", 30)
        assert store.sizes(["nothing"]) == [None]
        assert 0.09 < (store.health().latency or 0) < 1.0
        assert store.wait > 0.3
        store.close()
