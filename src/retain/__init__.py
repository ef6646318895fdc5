"""Retain keeps what inference engines compute and throw away: the KV cache, as a layer of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retain.address import TierAddress
    from retain.cache import BlockCache

__version__ = "0.1.0"

DAEMON = "daemon"
"""The word that, before tiers, has the node's daemon keep them."""

__all__ = ["DAEMON", "__version__", "open"]


def open(*tiers: str | TierAddress, policy: str = "reuse-leaf") -> BlockCache:
    """Open a cache over tiers, in the order they are asked: "memory:4GiB", "disk:PATH?capacity=50GiB".

    With "daemon" as the first word the node's daemon keeps the cache, started if need be, over the tiers that
    follow or, if none do, those of the configuration: retain.cache.open_cache, retain.daemon.start.
    """
    if tiers and tiers[0] == DAEMON:
        from retain.config import resolve
        from retain.daemon.start import connect

        return connect(tiers[1:] or resolve().settings.tiers, policy)
    from retain.cache import open_cache

    return open_cache(*tiers, policy=policy)
