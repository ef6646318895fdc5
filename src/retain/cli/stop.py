"""`retain stop`: ends the node's daemons; what they wrote to the tiers below stays."""

from __future__ import annotations

import typer

from retain.cli.daemons import client, sockets
from retain.cli.options import Tiers, settings
from retain.cli.terminal import stdout


def stop(context: typer.Context, tier: Tiers = None) -> None:
    """End the daemon of these tiers, or every daemon of this user. Engines go on without, and miss."""
    chosen = settings(context, tiers=tier)
    ended = 0
    for path in sockets(chosen.tiers if tier else None, chosen.policy):
        found = client(path)
        if found is not None:
            with found:
                ended += found.stop_daemon()
    stdout.print(f"{ended} daemon{'' if ended == 1 else 's'} ended")
