"""LMCache as a peer to measure beside, in a venv of its own: its server, the one mode that runs on a CPU, and
its own bench of stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from retain.bench.services import free_port
from retain.bench.vllm_trial import TrialError, session_of
from retain.engines import vllm

READY_SECONDS = 120.0
_STORED = re.compile(r"Stored (\d+) tokens in ([\d.]+) seconds")

L2_KEYS, L2_ROUNDS, L2_SECONDS = 16, 8, 300.0
_ROUND = re.compile(r"\[(Store|Load)\] Round \d+: ([\d.]+) ms, \w+=(\d+)/(\d+)")


def file_rates(python: str, folder: Path, size: int) -> dict[str, float]:
    """Bytes a second of wall time that `lmcache bench l2` stores ("put") and loads ("get") with its adapter
    for files, in objects of `size` bytes; medians of its rounds. Raises TrialError.
    """
    place = folder / f"lmcache-{size}"
    place.mkdir()
    command = [
        str(Path(python).parent / "lmcache"), "bench", "l2", "--num-keys", str(L2_KEYS),
        "--data-size-kb", str(size >> 10), "--rounds", str(L2_ROUNDS),
        "--l2-adapter", json.dumps({"type": "fs", "base_path": str(place)}),
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=L2_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"lmcache bench l2 did not end within {L2_SECONDS:.0f} s") from error
    found: dict[str, list[float]] = {"put": [], "get": []}
    for verb, milliseconds, done, of in _ROUND.findall(ran.stdout):
        if done == of:
            found["put" if verb == "Store" else "get"].append(float(milliseconds) / 1e3)
    if not all(found.values()):
        words = " / ".join((ran.stderr or ran.stdout).strip().splitlines()[-3:])
        raise TrialError(f"lmcache bench l2 measured nothing: {words}")
    return {verb: L2_KEYS * size / median(seconds) for verb, seconds in found.items()}


class LMCacheServer:
    """`lmcache server` on loopback, as a context manager; `python` is that of the venv it is installed in."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = Path(python)
        self._log = folder / "lmcache.log"
        self._port, self._http, self._metrics = (free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None
        # As a file, for Retain itself is not installed there; -P keeps the modules beside it out of the way.
        self.program = ("-P", str(Path(vllm.__file__).with_name("trial.py")))
        self.environment: dict[str, str] = {}
        self.connector: dict[str, Any] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }

    def __enter__(self) -> Self:
        command = [
            str(self._python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(self._port),
            "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--chunk-size", "256", "--max-workers", "1",
            "--eviction-policy", "LRU", "--http-port", str(self._http),
            "--prometheus-port", str(self._metrics), "--supported-transfer-mode", "auto",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._http), 1):
                return self
            time.sleep(0.2)
        self._stop()
        words = " / ".join(self._log.read_text("utf-8", "replace").strip().splitlines()[-4:])
        raise TrialError(f"LMCache's server did not start: {words}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def stored(self) -> tuple[float, float]:
        """Tokens stored so far and the seconds that took, as the server's log says."""
        found = _STORED.findall(self._log.read_text("utf-8", "replace"))
        return sum(float(tokens) for tokens, _ in found), sum(float(seconds) for _, seconds in found)

    def _stop(self) -> None:
        if self._process is not None:
            for pid in session_of(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
