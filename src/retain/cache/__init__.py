"""The cache: tiers in the order they are asked, and the calls of the waist over them. `open_cache` builds
one.
"""

from __future__ import annotations

from retain.address import TierAddress, parse_tier
from retain.codecs import codec
from retain.errors import ConfigError
from retain.stores.opening import open_store

from .cache import Cache
from .contract import BlockCache
from .flight import Flight
from .gaps import Gaps
from .ledger import Ledger
from .planner import Planner
from .results import (
    Hit,
    Loaded,
    Nearest,
    Query,
    Reservation,
    Stats,
    StoreResult,
    Tally,
    TierStats,
)
from .select import Prefix, Selection
from .tenants import Tenants
from .tier import Tier

DEFAULT_TIERS = ("memory:1GiB",)
STAGING_BYTES = 512 << 20
"""The arena of a cache that names no memory tier: every block passes through one."""

POLICIES = ("reuse-leaf", "lru-leaf", "lru")


def open_cache(*tiers: str | TierAddress, policy: str = "reuse-leaf") -> Cache:
    """Build a Cache from tier addresses, in the order they are asked: `memory:4GiB`,
    `disk:PATH?capacity=50GiB&codec=raw`, `redis://HOST`. docs/stores.md lists them all.

    Without a memory tier one of 512 MiB is added in front, for staging. Raises ConfigError for an address or
    policy that cannot be used, StoreUnavailable for a folder that cannot be written.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy!r}; known are {', '.join(POLICIES)}")
    addresses = [parse_tier(each) if isinstance(each, str) else each for each in tiers or DEFAULT_TIERS]
    memory = [each for each in addresses if each.kind == "memory"]
    if len(memory) > 1 or (memory and addresses[0] is not memory[0]):
        raise ConfigError("a cache has one memory tier, and it comes first")
    if not memory:
        addresses.insert(0, TierAddress("memory", capacity=STAGING_BYTES))
    ledger = Ledger()
    named = [name for each in addresses for name, _ in (*each.rules.quotas, *each.rules.ttls) if name]
    tenants, gaps = Tenants(named), Gaps()
    built: list[Tier] = []
    for address in addresses:
        store = open_store(address)
        name = store.kind if all(tier.kind != store.kind for tier in built) else f"{store.kind}-{len(built)}"
        place = (name, store, address.capacity, codec(address.codec), policy, ledger)
        built.append(Tier(*place, address.rules, tenants, gaps))
    return Cache(built, ledger)


__all__ = [
    "BlockCache",
    "Cache",
    "Flight",
    "Hit",
    "Ledger",
    "Loaded",
    "Nearest",
    "Planner",
    "Query",
    "Reservation",
    "Stats",
    "Prefix",
    "Selection",
    "StoreResult",
    "Tally",
    "Tier",
    "TierStats",
    "open_cache",
]
