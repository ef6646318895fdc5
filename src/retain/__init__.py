"""Retain keeps what inference engines compute and throw away: the KV cache, as a layer of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retain.address import TierAddress
    from retain.cache import Cache

__version__ = "0.1.0"

__all__ = ["__version__", "open"]


def open(*tiers: str | TierAddress, policy: str = "lru-leaf") -> Cache:
    """Open a cache over tiers, in the order they are asked: `open("memory:4GiB", "disk:PATH?capacity=50GiB")`.

    See `retain.cache.open_cache`. The import waits for the first call, so that `import retain` stays light.
    """
    from retain.cache import open_cache

    return open_cache(*tiers, policy=policy)
