"""`retain serve` as a child process: started, waited for, stopped with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from retain.bench.services import free_port
from retain.daemon.client import RemoteCache
from retain.daemon.start import reach
from retain.daemon.wire import WireError
from retain.errors import RetainError

READY_SECONDS = 600.0
"""The first start of all may convert a model, on a machine that is busy."""

STOP_SECONDS = 90.0
"""More than the server's own grace for running requests and for flushing to disk."""


class OwnDaemons:
    """A runtime folder of this run's own, so that it and its servers meet no other daemon: a context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="retain-run-")
        self.environment = {"XDG_RUNTIME_DIR": self._folder.name}
        self._before: str | None = None

    def stop(self) -> int:
        """End every daemon; how many there were."""
        sockets = list((Path(self._folder.name) / "retain").glob("*.sock"))
        return sum(_end_daemon(path) for path in sockets)

    def __enter__(self) -> Self:
        self._before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ.update(self.environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = self._before
        self._folder.cleanup()


def _end_daemon(path: Path) -> bool:
    try:
        with RemoteCache(lambda: reach(path), "bench") as daemon:
            state = daemon.state()
            ended = daemon.stop_daemon()
    except (OSError, WireError):
        return False
    deadline = time.monotonic() + STOP_SECONDS
    while state is not None and Path(f"/proc/{state.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # it flushes what it has still to write
    return ended


class ServerError(RetainError):
    """The server did not start, or ended by itself; the text has the last lines of its log."""


class ServerProcess:
    """A server of `model` on a free port of this machine's loopback, as a context manager."""

    def __init__(
        self, model: str, options: Sequence[str], folder: Path, daemons: OwnDaemons | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        # Settings of whoever runs this must not change what is measured.
        config = folder / "empty.yaml"
        config.touch()
        self._command = [sys.executable, "-m", "retain.cli", "--config", str(config), "serve", model]
        self._command += ["--port", str(self.port), *options]
        self._environment = {} if daemons is None else daemons.environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RETAIN_")}
        environment |= self._environment
        with self._log.open("ab") as log:
            # A process group of its own, so that stopping it reaches whatever it starts.
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask the server to end, wait for it, and end whatever is left of its process group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"the server ended while it started: {self._last_words()}")
            if self._healthy():
                return
            time.sleep(0.1)
        raise ServerError(f"the server was not ready after {READY_SECONDS:.0f} s: {self._last_words()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:  # noqa: S310 - our own http URL
                return bool(json.load(answer).get("status") == "ok")
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it said nothing"
