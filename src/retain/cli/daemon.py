"""`retain daemon`: keeps the node's cache in a process of its own, in the foreground."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from retain.cli.options import Tiers, settings


def daemon(
    context: typer.Context,
    tier: Tiers = None,
    policy: Annotated[
        str | None, typer.Option(help="What is evicted first: lru or lru-leaf.", show_default=False)
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Listen here, not in the runtime folder.", show_default=False),
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End after so long without clients.", show_default=False),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve /metrics and /health on loopback.", show_default=False),
    ] = None,
) -> None:
    """Keep the node's cache for every engine on it, until stopped.

    Engines start it on demand; by hand or under systemd it runs for as long as it is wanted.
    """
    from retain.daemon.__main__ import run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = settings(context, tiers=tier, policy=policy)
    raise typer.Exit(run(chosen.tiers, chosen.policy, socket=socket, idle=idle, http=http))
