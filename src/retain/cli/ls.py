"""`retain ls`: the objects of a disk tier, newest first."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from retain.bench.report import cell
from retain.cli.objects import Listed, disk_tiers, listed
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import age, stdout

KEY_CHARACTERS = 16
"""How much of a key is shown: enough to tell blocks apart, and for `retain show` to find them."""


def ls(context: typer.Context, tier: Tiers = None, as_json: Json = False) -> None:
    """List what the disk tiers hold."""
    with disk_tiers(settings(context, tiers=tier).tiers) as tiers:
        objects = sorted(listed(tiers), key=lambda each: -each.stored.modified)
    if as_json:
        print(json.dumps([_plain(each) for each in objects]))
        return
    table = Table("key", "model", "tokens", "codec", "size", "age", "fidelity")
    for each in objects:
        key, header = each.stored.name[:KEY_CHARACTERS], each.header
        size, since = cell("size_bytes", each.stored.size), age(each.stored.modified)
        if header is None:
            table.add_row(key, "", "", "", size, since, f"[red]unreadable: {each.problem}[/]")
            continue
        tokens = f"{header.first}-{header.first + header.count}"
        table.add_row(key, header.model, tokens, header.codec, size, since, header.fidelity)
    stdout.print(table)
    total = sum(each.stored.size for each in objects)
    stdout.print(f"{len(objects)} objects, {cell('total_bytes', total)}")


def _plain(each: Listed) -> dict[str, object]:
    header = each.header
    row: dict[str, object] = {
        "name": each.stored.name,
        "tier": f"disk:{each.tier.path}",
        "size_bytes": each.stored.size,
        "modified": each.stored.modified,
    }
    if header is None:
        return {**row, "problem": each.problem}
    return {
        **row,
        "key": header.key.hex(),
        "kin": header.kin.hex(),
        "variant": header.variant.hex(),
        "space": header.space.hex(),
        "model": header.model,
        "first": header.first,
        "tokens": header.count,
        "codec": header.codec,
        "dtype": header.dtype,
        "slice": header.slice.text,
        "fidelity": header.fidelity,
        "producer": header.producer,
    }
