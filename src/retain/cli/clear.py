"""`retain clear`: removes the objects of the disk tiers and says truly how many."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from retain.bench.report import cell
from retain.cli.objects import disk_tiers
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import stdout

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def clear(context: typer.Context, tier: Tiers = None, yes: Yes = False, as_json: Json = False) -> None:
    """Remove everything that the disk tiers hold. A running server loses it too: it will miss."""
    removed = []
    with disk_tiers(settings(context, tiers=tier).tiers) as tiers:
        for each in tiers:
            objects = list(each.store.scan())
            held = f"{len(objects)} objects, {cell('total_bytes', sum(stored.size for stored in objects))},"
            if objects and not yes:
                typer.confirm(f"Remove {held} from {each.path}?", abort=True, err=True)
            gone = [stored.size for stored in objects if each.store.delete(stored.name)]
            removed.append((each.path, len(gone), sum(gone)))
    if as_json:
        print(json.dumps([{"tier": f"disk:{p}", "objects": n, "bytes": size} for p, n, size in removed]))
        return
    for path, count, size in removed:
        stdout.print(f"disk:{path}: removed {count} objects, {cell('removed_bytes', size)}")
