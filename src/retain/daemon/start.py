"""Finding the daemon of a configuration, or starting one: one per user and configuration, raced starts settle
on one.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from retain.address import TierAddress, parse_tier
from retain.errors import RetainError, StoreUnavailable

from . import wire
from .client import RemoteCache

START_SECONDS = 30.0
"""How long a start on demand may take: rebuilding the index of a full disk tier counts in."""

AGAIN_SECONDS = 15.0
"""After how long a daemon that was started and does not answer counts as dead: another one is started, which
ends by itself if the first was merely slow.
"""

IDLE_SECONDS = 600.0
"""After how long without clients a daemon that was started on demand ends."""

LONGEST_PATH = 107
"""What sockaddr_un holds, in bytes, without the zero at the end."""

log = logging.getLogger("retain.daemon")


def connect(
    tiers: Sequence[str | TierAddress],
    policy: str = "reuse-leaf",
    *,
    client: str = "python",
    start: bool = True,
) -> RemoteCache:
    """The cache of the daemon for these tiers and policy, which is started if need be.

    Raises StoreUnavailable when there is none and none can be started.
    """
    addresses = [parse_tier(each) if isinstance(each, str) else each for each in tiers]
    path = socket_path(addresses, policy)

    def dial() -> socket.socket:
        try:
            return reach(path)
        except OSError:
            if not start:
                raise
        return _started(addresses, policy, path)

    try:
        return RemoteCache(dial, client, START_SECONDS)
    except (OSError, wire.WireError) as error:
        raise StoreUnavailable(
            f"the daemon at {path} cannot be reached: {error}; see {log_path(path)}"
        ) from error


def reach(path: Path) -> socket.socket:
    """A connection to the daemon at `path`. Raises OSError; PermissionError when it is somebody else's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(5.0)
        with address_of(path) as address:
            connection.connect(address)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.getuid(), 0):
            raise PermissionError(f"the daemon at {path} belongs to user {uid}")
        return connection
    except BaseException:
        connection.close()
        raise


def listen(path: Path) -> tuple[socket.socket, int] | None:
    """The listening socket of the daemon for `path`, and the lock that makes it the only one; None if there
    is one.

    A socket handed over by systemd is taken instead of a new one.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        return socket.socket(fileno=3), lock
    with suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with address_of(path) as address:
            listener.bind(address)
    finally:
        os.umask(before)
    listener.listen(64)
    return listener, lock


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """The path by which a socket can be bound or reached: sockets' own paths have at most 107 bytes."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def spawn(tiers: Sequence[TierAddress], policy: str, path: Path) -> None:
    """Start a daemon in a session of its own, its log beside its socket. It ends by itself when idle.

    It is nobody's child: engines such as vLLM end, with themselves, all processes that descend from them.
    """
    arguments = [sys.executable, "-m", "retain.daemon", "--detach", "--socket", str(path), "--policy", policy]
    arguments += ["--idle", str(IDLE_SECONDS)]
    arguments += [f"--tier={tier}" for tier in tiers]
    with open(log_path(path), "ab") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    threading.Thread(target=process.wait, name="retain-bury", daemon=True).start()


def _started(tiers: Sequence[TierAddress], policy: str, path: Path) -> socket.socket:
    """A connection to the daemon, which one of those who wait for it starts. Raises OSError.

    Where a daemon ends under many clients, a start by each would take the machine from all of them.
    """
    deadline = time.monotonic() + START_SECONDS
    pause = 0.02
    lock: int | None = None
    start_at = 0.0
    try:
        while True:
            if lock is None:
                lock = _starting(path)
            try:
                return reach(path)
            except PermissionError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
            if lock is not None and time.monotonic() > start_at:
                spawn(tiers, policy, path)
                start_at = time.monotonic() + AGAIN_SECONDS
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)
    finally:
        if lock is not None:
            os.close(lock)


def _starting(path: Path) -> int | None:
    """The lock of who starts the daemon of `path`, None while somebody else has it; it ends with them."""
    lock = os.open(f"{path}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def socket_path(tiers: Sequence[TierAddress], policy: str) -> Path:
    """Where the daemon for this configuration listens: the same for every process of the user."""
    text = "\n".join([policy, *(str(tier) for tier in tiers)])
    return runtime_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.sock"


def log_path(path: Path) -> Path:
    """Where the daemon of a socket writes its log."""
    return path.with_suffix(".log")


def running() -> list[Path]:
    """The sockets in the runtime folder: those of daemons that run, and perhaps of some that were killed."""
    return sorted(runtime_folder().glob("*.sock"))


def runtime_folder() -> Path:
    """The user's own folder for sockets. Raises RetainError when it is not safe to use."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "retain" if base else Path(tempfile.gettempdir()) / f"retain-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RetainError(f"the runtime folder {folder} is not a folder of this user's; remove it")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder
