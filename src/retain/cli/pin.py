"""`retain pin` and `retain unpin`: keep blocks from being evicted by capacity, or no longer."""

from __future__ import annotations

from pathlib import Path

import typer

from retain.cli.clear import show
from retain.cli.daemons import client
from retain.cli.options import Json, Tiers, settings
from retain.cli.selecting import Keys, Model, OlderThan, PrefixFile, Tenant, added, of_digest, selection
from retain.errors import ConfigError


def pin(
    context: typer.Context,
    tier: Tiers = None,
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    prefix: PrefixFile = None,
    key: Keys = None,
    as_json: Json = False,
) -> None:
    """Keep the selected blocks from being evicted: with --prefix, those of the very text.

    The daemon that keeps the tiers remembers it until it ends. Exits with 1 where pins have no room left.
    """
    _pin(context, tier, model, tenant, older_than, prefix, key, as_json=as_json, pinned=True)


def unpin(
    context: typer.Context,
    tier: Tiers = None,
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    prefix: PrefixFile = None,
    key: Keys = None,
    as_json: Json = False,
) -> None:
    """Undo `retain pin` for the selected blocks, or for all."""
    _pin(context, tier, model, tenant, older_than, prefix, key, as_json=as_json, pinned=False)


def _pin(
    context: typer.Context,
    tier: list[str] | None,
    model: str | None,
    tenant: str | None,
    older_than: str | None,
    prefix: Path | None,
    keys: list[str] | None,
    *,
    as_json: bool,
    pinned: bool,
) -> None:
    from retain.daemon.start import socket_path

    if pinned and not any((model, tenant, older_than, prefix, keys)):
        raise ConfigError("say what to pin: --prefix FILE --model MODEL, --key KEY, --tenant NAME ...")
    which = selection(
        model=model,
        tenant=tenant,
        older_than=older_than,
        prefix=prefix,
        keys=keys,
        beyond=not pinned,
    )
    chosen = settings(context, tiers=tier)
    found = client(socket_path(chosen.tiers, chosen.policy))
    if found is None:
        raise ConfigError(
            "pins are the daemon's, and none keeps these tiers; engines start one, or run: retain daemon"
        )
    with found:
        change = found.pin if pinned else found.unpin
        tally = added([change(each) for each in of_digest(which, model)])
    show(tally, "pinned" if pinned else "unpinned", as_json=as_json)
