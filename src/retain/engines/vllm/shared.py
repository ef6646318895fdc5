"""What the two roles of a connector share where they live in one process: the cache, and each other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import retain

from .settings import Settings

if TYPE_CHECKING:
    from retain.cache import BlockCache

    from .worker import Worker

_lock = threading.Lock()
_engines: dict[str, Shared] = {}


@dataclass
class Shared:
    """One engine's part in this process. `worker` is None where the workers are elsewhere."""

    cache: BlockCache
    roles: int = 0
    worker: Worker | None = None
    engine: str = ""

    def leave(self) -> None:
        """To be called once by each role; the last one closes the cache."""
        with _lock:
            self.roles -= 1
            if self.roles > 0:
                return
            _engines.pop(self.engine, None)
        self.cache.close()


def join(engine: str, settings: Settings, single: bool) -> Shared:
    """The cache of an engine, opened by the first role that asks here. Raises RetainError.

    `single`: both roles live in this process. Only then can it be the process's own cache; else, and where
    no tiers are named, the daemon keeps it.
    """
    with _lock:
        shared = _engines.get(engine)
        if shared is None:
            shared = _engines[engine] = Shared(_open(settings, single), engine=engine)
        shared.roles += 1
        return shared


def _open(settings: Settings, single: bool) -> BlockCache:
    tiers = settings.tiers
    if not tiers or not single:
        tiers = ("daemon", *(tier for tier in tiers if tier != "daemon"))
    return retain.open(*tiers)
