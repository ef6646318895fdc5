"""A runtime folder of the test's own, and every daemon in it ended afterwards."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from retain.daemon import start


@pytest.fixture
def runtime(tmp_path_factory, monkeypatch):
    # Socket paths are short by law (108 bytes), and pytest's folders are not.
    folder = tmp_path_factory.mktemp("run", numbered=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder / "retain"
    for pid in pids(folder):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while pids(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    """The daemons whose sockets lie under `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if b"retain.daemon" in command and str(folder).encode() in command and not zombie:
                found.append(int(entry.name))
    return found


@pytest.fixture
def connect(runtime, tmp_path):
    """Open clients of one daemon; they are closed at the end."""
    clients = []

    def open_one(*tiers, **fields):
        client = start.connect(tiers or ("memory:8MiB", f"disk:{tmp_path / 'kept'}"), **fields)
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        client.close()


def run_python(program: str, **fields) -> "subprocess.Popen[str]":
    """A Python process that can import the tests' modules."""
    root = Path(__file__).parent.parent.parent
    import sys

    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=root,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **fields,
    )
