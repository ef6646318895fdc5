"""Servers for benches and tests: redis-server, nginx, an S3 server, where they are installed.

A server ends with its `with` block, and with the thread that started it however that ends: start servers
from a thread that lives as long as they shall.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from retain.errors import MissingDependency, RetainError

START_SECONDS = 30.0

# Runs argument 2 and what follows in its place, to be killed with its parent, process argument 1. Not a
# preexec_fn, which may deadlock in a process that has threads.
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class ServiceError(RetainError):
    """A server did not start; the text has the last lines of its log."""


@dataclass
class Running:
    """A server process and its port on the loopback."""

    process: subprocess.Popen[bytes]
    port: int

    def stop(self) -> None:
        """Have it hang (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[Running]:
    """A server that listens on `port` of the loopback. Raises ServiceError where it does not come to that."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            with_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        try:
            wait_for_port(port, process)
        except OSError as error:
            words = log.read_text("utf-8", "replace")[-2000:]
            raise ServiceError(f"{command[0]} does not start: {words or error}") from error
        yield Running(process, port)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@contextmanager
def redis_server(folder: Path, *options: str, port: int | None = None) -> Iterator[Running]:
    """A redis-server that writes nothing to disk; PORT in options stands for its port."""
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    listen = [] if "--tls-port" in options else ["--port", str(port)]
    command = [program("redis-server"), *listen, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    command += [option.replace("PORT", str(port)) for option in options]
    with running(command, port, folder / "log") as found:
        yield found


@contextmanager
def nginx(folder: Path, root: Path, *, extra: str = "", listen: str = "") -> Iterator[Running]:
    """Serves the files below `root`, in one process: a master that is killed leaves its workers behind."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{each}_temp_path {folder}/{each};" for each in places)
    (folder / "nginx.conf").write_text(
        f"""daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
        {"user root;" if os.getuid() == 0 else ""}
        events {{ worker_connections 256; }}
        http {{ access_log off; sendfile on; {temporary} keepalive_requests 1000000;
          server {{ listen 127.0.0.1:{port} {listen}; root {root}; {extra} }} }}"""
    )
    command = [program("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with running([*command, "-e", str(folder / "early.log")], port, folder / "log") as found:
        yield found


@contextmanager
def s3_server(folder: Path, port: int | None = None) -> Iterator[Running]:
    """An S3 server that asks for no credentials and keeps everything in memory."""
    if importlib.util.find_spec("moto") is None:
        raise MissingDependency("the S3 server needs moto: pip install 'retain[dev]'")
    port = port or free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, folder / "moto.log") as found:
        yield found


def make_bucket(port: int, name: str) -> None:
    """A bucket of the S3 server on `port`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("PUT", f"/{name}")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise ServiceError(f"the S3 server makes no bucket: {answer.status} {answer.reason}")
    finally:
        connection.close()


def with_parent(command: Sequence[str]) -> list[str]:
    """The command, to be killed when the thread that starts it ends."""
    return [sys.executable, "-S", "-E", "-c", _WITH_PARENT, str(os.getpid()), *command]


def program(name: str) -> str:
    """The path of an installed program. Raises MissingDependency."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
    if found is None:
        raise MissingDependency(f"{name} is not installed (make deps)")
    return found


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> None:
    """Wait until `process` listens on `port`. Raises OSError where it ends or takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
