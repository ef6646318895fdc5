"""Real servers for tests, those of retain.bench.services: where one is not installed, the test is skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from retain.bench import services
from retain.bench.chaos.proxy import Proxy
from retain.bench.services import Running, free_port
from retain.errors import MissingDependency

__all__ = [
    "Proxy",
    "Running",
    "certificate",
    "free_port",
    "nginx",
    "program",
    "redis_server",
    "running",
    "s3_server",
]


def program(name: str) -> str:
    try:
        return services.program(name)
    except MissingDependency as error:
        pytest.skip(str(error))


@contextmanager
def _or_skip(server: AbstractContextManager[Running]) -> Iterator[Running]:
    try:
        found = server.__enter__()
    except MissingDependency as error:
        pytest.skip(str(error))
    try:
        yield found
    finally:
        server.__exit__(None, None, None)


def running(command: Sequence[str], port: int, log: Path) -> AbstractContextManager[Running]:
    return services.running(command, port, log)


def redis_server(folder: Path, *options: str, port: int | None = None) -> AbstractContextManager[Running]:
    return _or_skip(services.redis_server(folder, *options, port=port))


def nginx(folder: Path, root: Path, *, extra: str = "", listen: str = "") -> AbstractContextManager[Running]:
    return _or_skip(services.nginx(folder, root, extra=extra, listen=listen))


def s3_server(folder: Path) -> AbstractContextManager[Running]:
    return _or_skip(services.s3_server(folder))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and localhost, and its key."""
    openssl = program("openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, "req", *kind, *files, *names], check=True, capture_output=True)
    return cert, key
