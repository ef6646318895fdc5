"""`retain serve` as a child process: started, waited for, stopped with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from retain.errors import RetainError

READY_SECONDS = 600.0
"""The first start of all may convert a model, on a machine that is busy."""

STOP_SECONDS = 90.0
"""More than the server's own grace for running requests and for flushing to disk."""


class ServerError(RetainError):
    """The server did not start, or ended by itself; the text has the last lines of its log."""


class ServerProcess:
    """A server of `model` on a free port of this machine's loopback, as a context manager."""

    def __init__(self, model: str, options: Sequence[str], folder: Path) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        # Settings of whoever runs this must not change what is measured.
        config = folder / "empty.yaml"
        config.touch()
        self._command = [sys.executable, "-m", "retain.cli", "--config", str(config), "serve", model]
        self._command += ["--port", str(self.port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RETAIN_")}
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
