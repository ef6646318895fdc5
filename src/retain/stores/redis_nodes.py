"""The servers behind a redis store: what an address names, and connections to them, made by redis-py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from retain.errors import ConfigError, MissingDependency, StoreUnavailable
from retain.stores.link import Link
from retain.stores.remote import Call

SCHEMES = (
    "redis",
    "rediss",
    "redis+unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)
IDLE_CONNECTIONS = 16
"""Connections to one server that are kept for the next call."""


def topology(url: str, password: str | None, secure: dict[str, str]) -> Topology:
    """Read a URL. Raises ConfigError, MissingDependency."""
    redis = _redis()
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{url!r} is no address of a redis; known schemes are {', '.join(SCHEMES)}")
    if parts.password is not None:
        raise ConfigError("a password does not belong into an address; write password=file:PATH or env:NAME")
    scheme, _, form = parts.scheme.partition("+")
    tls = scheme == "rediss"
    if secure and not tls:
        raise ConfigError(f"{url!r} is without TLS, so certificates are of no use; write rediss")
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        "username": unquote(parts.username) if parts.username else None,
        "password": password,
    }
    if tls:
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **secure}
    if form == "unix":
        socket_path = unquote(parts.path)
        return _Single(Pool(lambda: redis.UnixDomainSocketConnection(path=socket_path, **options)))
    hosts = [_host(each, 26379 if form == "sentinel" else 6379) for each in _hosts(url, parts.netloc)]
    kind = redis.SSLConnection if tls else redis.Connection
    path = [unquote(each) for each in parts.path.split("/") if each]
    if form == "sentinel":
        if not path:
            raise ConfigError(f"{url!r} lacks the name of the service: redis+sentinel://HOST/SERVICE")
        options["db"] = _database(url, path[1:])
        return _Single(Pool(_through_sentinel(hosts, path[0], options, tls)))
    if form == "cluster":
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in hosts]
        for_map = options | {"ssl": tls, "socket_timeout": 2.0, "socket_connect_timeout": 2.0}
        return _Cluster(
            lambda: redis.cluster.RedisCluster(startup_nodes=nodes, **for_map),
            lambda host, port: kind(host=host, port=port, **options),
        )
    if len(hosts) != 1:
        raise ConfigError(f"{url!r} names several hosts; write redis+cluster or redis+sentinel")
    options["db"] = _database(url, path)
    return _Single(Pool(lambda: kind(host=hosts[0][0], port=hosts[0][1], **options)))


class Connection:
    """A connection that redis-py has made, and its bytes."""

    def __init__(self, inner: Any, link: Link) -> None:
        self._inner = inner
        self.link = link

    def close(self) -> None:
        with suppress(Exception):
            self._inner.disconnect()
        self.link.close()


class Pool:
    """Connections to one server. Safe from several threads; a forked process starts with none."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.open = True

    def take(self) -> Connection | None:
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None

    def give(self, connection: Connection) -> None:
        with self._lock:
            if self.open and self._owner == os.getpid() and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def connect(self, call: Call) -> Connection:
        left = call.answer_by - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        inner = self._make()
        inner.socket_connect_timeout = inner.socket_timeout = left
        inner.connect()
        return Connection(inner, Link(inner._sock))

    def drain(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self.open = False
        self.drain()


class Topology(Protocol):
    """Which server a key lies on."""

    def route(self, key: bytes) -> Pool: ...

    def primaries(self) -> list[Pool]: ...

    def refresh(self) -> None:
        """Find out anew who is in charge."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Single:
    """One server, or the one that Sentinel says is in charge whenever a connection is made."""

    pool: Pool

    def route(self, key: bytes) -> Pool:
        return self.pool

    def primaries(self) -> list[Pool]:
        return [self.pool]

    def refresh(self) -> None:
        self.pool.drain()

    def close(self) -> None:
        self.pool.close()


class _Cluster:
    """The servers of a cluster, as redis-py's map has them."""

    def __init__(self, map_of_slots: Callable[[], Any], make: Callable[[str, int], Any]) -> None:
        self._map_of_slots = map_of_slots
        self._make = make
        self._map: Any = None
        self._pools: dict[tuple[str, int], Pool] = {}
        self._lock = threading.Lock()

    def route(self, key: bytes) -> Pool:
        return self._pool(self._known().get_node_from_key(key))

    def primaries(self) -> list[Pool]:
        return [self._pool(node) for node in self._known().get_primaries()]

    def refresh(self) -> None:
        with self._lock:
            known = self._map
        if known is not None:
            known.nodes_manager.initialize()

    def close(self) -> None:
        with self._lock:
            known, self._map = self._map, None
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
        if known is not None:
            known.close()

    def _known(self) -> Any:
        with self._lock:
            if self._map is None:
                self._map = self._map_of_slots()
            return self._map

    def _pool(self, node: Any) -> Pool:
        if node is None:
            raise StoreUnavailable("the cluster serves no node for this key")
        place = (node.host, node.port)
        with self._lock:
            pool = self._pools.get(place)
            if pool is None:
                pool = self._pools[place] = Pool(lambda: self._make(*place))
            return pool


def _through_sentinel(
    hosts: list[tuple[str, int]], service: str, options: dict[str, Any], tls: bool
) -> Callable[[], Any]:
    redis = _redis()
    timeouts = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    for_sentinel: dict[str, Any] = {**timeouts, "retry": options["retry"], "protocol": 2}
    if tls:
        for_sentinel |= {"ssl": True} | {n: v for n, v in options.items() if n.startswith("ssl_")}
    sentinel = redis.sentinel.Sentinel(hosts, sentinel_kwargs=for_sentinel)
    pool = redis.sentinel.SentinelConnectionPool(
        service, sentinel, ssl=tls, max_connections=1 << 30, **options
    )
    return pool.make_connection  # type: ignore[no-any-return]


def _hosts(url: str, netloc: str) -> list[str]:
    found = [each for each in netloc.rpartition("@")[2].split(",") if each]
    if not found:
        raise ConfigError(f"{url!r} names no host")
    return found


def _host(text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        return parts.hostname or "localhost", parts.port or port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no host: {error}") from error


def _database(url: str, path: Sequence[str]) -> int:
    if not path:
        return 0
    if len(path) > 1 or not path[0].isdigit():
        raise ConfigError(f"{url!r} does not end in the number of a database")
    return int(path[0])


def shown(url: str) -> str:
    """A URL without its user."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2] or ''}{parts.path}"


def _redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.retry
        import redis.sentinel
    except ImportError as error:
        raise MissingDependency("a redis tier needs redis-py: pip install 'retain[redis]'") from error
    return redis


def errors_of_redis() -> tuple[type[Exception], ...]:
    return (_redis().exceptions.RedisError,)
