"""`retain stats`: what the disk tiers hold, by model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import typer
from rich.table import Table

from retain.bench.report import cell
from retain.cli.objects import disk_tiers, listed
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import stdout


@dataclass
class _Sum:
    objects: int = 0
    tokens: int = 0
    size: int = 0
    spaces: set[bytes] = field(default_factory=set)


def stats(context: typer.Context, tier: Tiers = None, as_json: Json = False) -> None:
    """Count what the disk tiers hold: objects, tokens and bytes, by model, dtype, codec and fidelity.

    A running server tells its own counters under /metrics.
    """
    chosen = settings(context, tiers=tier).tiers
    capacities = {address.path: address.capacity for address in chosen}
    sums: dict[tuple[str, str, str, str, str], _Sum] = {}
    totals: dict[str, int] = {}
    with disk_tiers(chosen) as tiers:
        limits = {f"disk:{each.path}": capacities[each.path] for each in tiers}
        for each in listed(tiers):
            place, header = f"disk:{each.tier.path}", each.header
            totals[place] = totals.get(place, 0) + each.stored.size
            model, dtype, codec, fidelity = "(unreadable)", "", "", ""
            if header is not None:
                model, dtype = header.model, header.dtype
                codec, fidelity = header.codec, header.fidelity
            total = sums.setdefault((place, model, dtype, codec, fidelity), _Sum())
            total.objects += 1
            total.size += each.stored.size
            if header is not None:
                total.tokens += header.count
                total.spaces.add(header.space)
    if as_json:
        names = ("tier", "model", "dtype", "codec", "fidelity")
        rows = [
            {
                **dict(zip(names, what, strict=True)),
                "objects": s.objects,
                "tokens": s.tokens,
                "bytes": s.size,
            }
            | {"spaces": len(s.spaces)}
            for what, s in sorted(sums.items())
        ]
        held = [
            {"tier": place, "bytes": totals.get(place, 0), "capacity": limit}
            for place, limit in limits.items()
        ]
        print(json.dumps({"tiers": held, "rows": rows}))
        return
    table = Table("tier", "model", "dtype", "codec", "fidelity", "objects", "tokens", "spaces", "size")
    for what, s in sorted(sums.items()):
        numbers = (f"{s.objects:,}", f"{s.tokens:,}", str(len(s.spaces)), cell("size_bytes", s.size))
        table.add_row(*what, *numbers)
    stdout.print(table)
    for place, limit in limits.items():
        bound = "no limit of its own" if limit is None else f"of {cell('limit_bytes', limit)}"
        stdout.print(f"{place}: {cell('used_bytes', totals.get(place, 0))}, {bound}")
