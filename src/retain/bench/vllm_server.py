"""vLLM's OpenAI-compatible server as a child process with everything it starts: begun, waited for, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retain.bench.services import free_port, with_parent
from retain.bench.vllm_trial import ENVIRONMENT, TrialError, engine_python, session_of

READY_SECONDS = 600.0
"""A start costs 45 s of CPU time, on a machine that may be busy."""


class VllmServer:
    """A server of `model`, called `name`, started when the block is entered; `wait` until it is ready.

    `role` is vLLM's `kv_role`, None leaves Retain out; `settings` are the connector's, `options` vLLM's own
    words for its command line. Raises ConfigError where no Python with vLLM is found.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        role: str | None,
        settings: Mapping[str, Any],
        options: Sequence[str],
        environment: Mapping[str, str],
        name: str = "model",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{self.port}.log"
        self._environment = environment
        module = "vllm.entrypoints.openai.api_server"  # the wheel for CPUs has no command that starts
        self._command = [engine_python(), "-m", module, "--model", str(model), "--served-model-name", name]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        self._command += ["--enforce-eager", *options]
        if role is not None:
            connector: dict[str, Any] = {
                "kv_connector": "RetainConnector",
                "kv_role": role,
                "kv_connector_extra_config": dict(settings),
            }
            self._command += ["--kv-transfer-config", json.dumps(connector)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(self._command),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **self._environment},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait(self) -> None:
        """Until it answers. Raises TrialError where it ends before, or takes too long."""
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()  # noqa: S310 - our own http URL
                return
            time.sleep(0.2)
        words = " / ".join(self.log.read_text("utf-8", "replace").strip().splitlines()[-4:])
        raise TrialError(f"vLLM's server did not start: {words}")

    def kill(self) -> None:
        """End it with everything it started, at once (SIGKILL). Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def metric(self, name: str) -> float:
        """The sum of a metric of the server over its labels; 0 where it has none of that name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:  # noqa: S310 - our own http URL
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )
