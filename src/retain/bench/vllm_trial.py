"""A vLLM engine as a child process with everything it starts, for benches: asked, timed, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retain.errors import RetainError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class TrialError(RetainError):
    """The engine did not start or ended by itself; the text has the last lines of its log."""


@dataclass(frozen=True)
class Told:
    """What the engine answered: seconds until all prompts had all tokens, the tokens, what was reused."""

    seconds: float
    answers: tuple[tuple[int, ...], ...]
    cached: tuple[int, ...]


class Trial:
    """An engine started with `options` (vLLM's own names), as a context manager."""

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        python: str = sys.executable,
        program: Sequence[str] = ("-m", "retain.engines.vllm.trial"),
    ) -> None:
        given = {"engine": dict(options), "environment": ENVIRONMENT | dict(environment)}
        self._command = [python, *program, json.dumps(given)]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._read()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Told:
        """Have all prompts answered together. Raises TrialError."""
        process = self._process
        if process is None or process.stdin is None:
            raise TrialError("the engine has ended")
        process.stdin.write(
            json.dumps({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens}) + "\n"
        )
        process.stdin.flush()
        told = self._read()
        return Told(told["seconds"], tuple(map(tuple, told["answers"])), tuple(told["cached"]))

    def cpu_seconds(self) -> float:
        """CPU time so far of every process of the engine."""
        if self._process is None:
            return 0.0
        return sum(cpu_seconds(pid) for pid in session_of(self._process.pid))

    def stop(self) -> None:
        """End the engine with everything it started. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        _kill_session(process.pid)
        process.wait()

    def kill(self) -> None:
        """Kill every process of the engine at once (SIGKILL), whatever they are doing."""
        if self._process is not None:
            _kill_session(self._process.pid)

    def _read(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise TrialError("the engine has ended")
        line = self._process.stdout.readline()
        if not line:
            words = " / ".join(self._log.read_text("utf-8", "replace").strip().splitlines()[-4:])
            raise TrialError(f"the engine ended: {words}")
        told: dict[str, Any] = json.loads(line)
        return told


def _kill_session(leader: int) -> None:
    # Workers may be in process groups of their own, but not in other sessions.
    for pid in session_of(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_of(leader: int) -> list[int]:
    """The processes of the session that `leader` leads."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its reaped children included; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
