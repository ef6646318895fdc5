"""What a user may set: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from retain.errors import ConfigError
from retain.fidelity import ACCEPTABLE


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    `tiers` empty: the node's daemon, over the configuration's tiers. ["daemon", ...]: the daemon, over these.
    Others: a cache inside the process where vLLM runs in a single one, else also the daemon, over these.
    """

    tiers: tuple[str, ...] = ()
    tenant: str | None = None
    """A salt that joins every request's own: engines with different ones share nothing."""
    fidelity: str = "kin"
    """The lowest that is accepted of what is kept (retain.fidelity)."""
    load: bool = True
    store: bool = True
    store_generated: bool = True
    """Store the KV of generated tokens too, so that the next turn finds it."""
    store_tails: bool = True
    """Store the last, partial block of a request."""
    plan: bool = True
    """Load only what is predicted to be there sooner than computed."""
    load_timeout: float = 30.0
    """Seconds after which a load is given up and its request computed."""
    clear_on_reset: bool = True
    """Let vLLM's reset_prefix_cache (with the connector) remove this model's blocks from every tier."""


def read(extra: Mapping[str, Any]) -> Settings:
    """The settings in vLLM's extra config. Raises ConfigError for what is unknown or of a wrong type."""
    known = {field.name: field for field in fields(Settings)}
    unknown = sorted(extra.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has no setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    values = dict(extra)
    if "tiers" in values:
        tiers = values["tiers"]
        if isinstance(tiers, str):
            tiers = [tiers]
        if not isinstance(tiers, (list, tuple)) or not all(isinstance(each, str) for each in tiers):
            raise ConfigError(f"tiers must be a list of tier addresses, got {tiers!r}")
        values["tiers"] = tuple(tiers)
    for name in ("load", "store", "store_generated", "store_tails", "plan", "clear_on_reset"):
        if not isinstance(values.get(name, True), bool):
            raise ConfigError(f"{name} must be true or false, got {values[name]!r}")
    if not isinstance(values.get("tenant", ""), (str, type(None))):
        raise ConfigError(f"tenant must be a string, got {values['tenant']!r}")
    if values.get("fidelity", "kin") not in ACCEPTABLE:
        raise ConfigError(f"fidelity must be one of {', '.join(ACCEPTABLE)}, got {values['fidelity']!r}")
    seconds = values.get("load_timeout", 30.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0:
        raise ConfigError(f"load_timeout must be a number of seconds above zero, got {seconds!r}")
    return Settings(**values)
