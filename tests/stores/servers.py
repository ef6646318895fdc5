"""Real servers for tests: redis-server, nginx, an S3 server, and a proxy that spoils the way to them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@dataclass
class Running:
    """A server process of a test."""

    process: subprocess.Popen[bytes]
    port: int

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[Running]:
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        try:
            wait_for_port(port)
        except OSError:
            pytest.fail(f"{command[0]} does not start: {log.read_text()[-2000:]}")
        yield Running(process, port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (make deps)")
    return found


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[Running]:
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    listen = [] if "--tls-port" in options else ["--port", str(port)]
    command = [program("redis-server"), *listen, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with running(
        [*command, *(option.replace("PORT", str(port)) for option in options)], port, folder / "log"
    ) as found:
        yield found


@contextlib.contextmanager
def nginx(folder: Path, root: Path, *, extra: str = "", listen: str = "") -> Iterator[Running]:
    """Serves the files below `root`."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    temporary = " ".join(
        f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"""daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
        {"user root;" if os.getuid() == 0 else ""}
        events {{ worker_connections 256; }}
        http {{ access_log off; sendfile on; {temporary} keepalive_requests 100000;
          server {{ listen 127.0.0.1:{port} {listen}; root {root}; {extra} }} }}"""
    )
    command = [
        program("nginx"),
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "early.log"),
    ]
    with running(command, port, folder / "log") as found:
        yield found


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[Running]:
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed (pip install 'retain[dev]')")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "moto.log") as found:
        yield found


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and localhost, and its key."""
    openssl = program("openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, "req", *kind, *files, *names], check=True, capture_output=True)
    return cert, key


@dataclass
class Proxy:
    """Passes bytes between its port and another. What it does to them may change at any time.

    `delay`: seconds each piece from the server waits. `rate`: bytes a second from the server. `cut`: close
    both sides after so many bytes from the server. `refuse`: close at once. `silent`: accept, and
    pass nothing.
    """

    target: int
    port: int = 0
    delay: float = 0.0
    rate: float | None = None
    cut: int | None = None
    refuse: bool = False
    silent: bool = False
    connections: int = 0
    passed: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.reset()

    def reset(self) -> None:
        """Cut every connection."""
        gone, self._open = self._open, []
        for each in gone:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            if self.refuse:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, from_server: bool) -> None:
        try:
            while data := source.recv(64 << 10):
                while self.silent:
                    time.sleep(0.01)
                if from_server:
                    self.passed += len(data)
                    if self.delay:
                        time.sleep(self.delay)
                    if self.cut is not None and self.passed >= self.cut:
                        target.sendall(data[: max(0, len(data) - (self.passed - self.cut))])
                        break
                    if self.rate:
                        for at in range(0, len(data), 4096):
                            target.sendall(data[at : at + 4096])
                            time.sleep(len(data[at : at + 4096]) / self.rate)
                        continue
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
