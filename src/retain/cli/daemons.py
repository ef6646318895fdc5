"""The daemons that a command is about: that of the configured tiers, or those that run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retain.address import TierAddress

if TYPE_CHECKING:
    from retain.daemon.client import RemoteCache


def sockets(tiers: Sequence[TierAddress] | None, policy: str) -> list[Path]:
    """The socket of the daemon of these tiers; of every daemon where none are given."""
    from retain.daemon.start import running, socket_path

    return running() if tiers is None else [socket_path(tiers, policy)]


def client(path: Path) -> RemoteCache | None:
    """A client of the daemon at `path`; None where none answers."""
    from retain.daemon.client import RemoteCache
    from retain.daemon.start import reach
    from retain.daemon.wire import WireError

    try:
        return RemoteCache(lambda: reach(path), "retain")
    except (OSError, WireError):
        return None
