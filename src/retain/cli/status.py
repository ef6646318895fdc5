"""`retain status`: what the node's daemons keep and do, live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from retain.bench.report import cell
from retain.cli.daemons import client, sockets
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import stdout

if TYPE_CHECKING:
    from retain.daemon.client import RemoteCache
    from retain.daemon.messages import State

REFRESH_SECONDS = 1.0


def status(
    context: typer.Context,
    tier: Tiers = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show the daemon of these tiers, or every daemon of this user: tiers and whether their servers are up,
    hits, writes under way, failures.

    On a terminal the display goes on until interrupted. Exits with 1 where no daemon runs.
    """
    chosen = settings(context, tiers=tier)
    clients: dict[Path, RemoteCache] = {}
    for path in sockets(chosen.tiers if tier else None, chosen.policy):
        found = client(path)
        if found is not None:
            clients[path] = found
    try:
        states = _states(clients)
        if not states:
            stdout.print("no daemon runs; engines start one when they need it, or run: retain daemon")
            raise typer.Exit(1)
        if as_json:
            print(json.dumps([{"socket": str(path), **_plain(state)} for path, state in states.items()]))
        elif once or not stdout.is_terminal:
            stdout.print(_shown(states))
        else:
            with Live(_shown(states), console=stdout, auto_refresh=False) as live:
                while states:
                    time.sleep(REFRESH_SECONDS)
                    states = _states(clients)
                    live.update(_shown(states), refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        for each in clients.values():
            each.close()


def _states(clients: dict[Path, RemoteCache]) -> dict[Path, State]:
    found = {path: each.state() for path, each in clients.items()}
    return {path: state for path, state in found.items() if state is not None}


def _shown(states: dict[Path, State]) -> Group:
    parts: list[Table] = []
    for path, state in states.items():
        counters = state.counters
        asked, hits = counters["requested_tokens"], counters["hit_tokens"]
        share = f"{hits / asked:.1%} of {asked:,} tokens asked for" if asked else "nothing asked for yet"
        title = f"process {state.pid}, up {state.uptime:,.0f} s, {state.sessions} clients, {path.name}"
        columns = ["tier", "objects", "size", "capacity", "leased", "pinned", "codec"]
        table = Table(*columns, *(["server"] if state.health else []), title=title)
        for name, _, objects, size, capacity, leased, pinned, codec in state.tiers:
            limit = "-" if capacity >= 1 << 62 else cell("size_bytes", capacity)
            row = [name, f"{objects:,}", cell("size_bytes", size), limit, str(leased), str(pinned), codec]
            table.add_row(*row, *([state.health.get(name, "")] if state.health else []))
        table.caption = (
            f"hit {share}; {counters['stored_blocks']:,} blocks stored, {state.pending} writes under way, "
            f"{counters['evicted_objects']:,} evicted, {sum(state.failures.values()):,} failures"
            + _unreachable(state)
        )
        parts.append(table)
    return Group(*parts)


def _unreachable(state: State) -> str:
    """What of the tiers' room serves no prompt, in words; nothing where there is nothing."""
    size = sum(room.unreachable_bytes for room in state.rooms.values())
    return f"; {cell('size_bytes', size)} that no prompt can reach" if size else ""


def _plain(state: State) -> dict[str, object]:
    fields = ("name", "kind", "objects", "bytes", "capacity", "leased", "pinned", "codec")
    return {
        "pid": state.pid,
        "uptime_seconds": state.uptime,
        "sessions": state.sessions,
        "pending_writes": state.pending,
        "counters": state.counters,
        "failures": state.failures,
        "tiers": [dict(zip(fields, tier, strict=True)) for tier in state.tiers],
        "health": state.health,
        "rooms": {
            name: {
                "pinned_bytes": room.pinned_bytes,
                "unreachable_objects": room.unreachable_objects,
                "unreachable_bytes": room.unreachable_bytes,
                "tenants": {
                    tenant: {"objects": objects, "bytes": size}
                    for tenant, (objects, size) in room.tenants.items()
                },
            }
            for name, room in state.rooms.items()
        },
    }
