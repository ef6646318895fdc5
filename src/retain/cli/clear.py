"""`retain clear`: removes what is kept, all of it or what is selected, and says truly how much."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from retain.bench.report import cell
from retain.cli.options import Json, Tiers, settings
from retain.cli.selecting import (
    Keys,
    Model,
    OlderThan,
    PrefixFile,
    Tenant,
    added,
    cache_of,
    of_digest,
    selection,
    told,
)
from retain.cli.terminal import stderr, stdout

if TYPE_CHECKING:
    from retain.cache import BlockCache, Tally

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def clear(
    context: typer.Context,
    tier: Tiers = None,
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    prefix: PrefixFile = None,
    key: Keys = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove everything that the tiers keep, or what the options say, all of which must hold.

    Where a daemon keeps these tiers it does the work, and memory is cleared too. A tier that hosts share
    loses it for all of them. Exits with 1 where something could not be reached.
    """
    which = selection(model=model, tenant=tenant, older_than=older_than, prefix=prefix, keys=key)
    with cache_of(settings(context, tiers=tier)) as cache:
        if not yes:
            what = "what is selected of" if any((model, tenant, older_than, prefix, key)) else ""
            held = f"{what} {_held(cache) or 'what is kept'}".strip()
            typer.confirm(f"Remove {held}?", abort=True, err=True)
        tally = added([cache.remove(each) for each in of_digest(which, model)])
    show(tally, "removed", as_json=as_json)


def show(tally: Tally, what: str, *, as_json: bool) -> None:
    """Print a tally; exits with 1 where something was missed."""
    if as_json:
        print(json.dumps(told(tally)))
    else:
        for name, (objects, size) in tally.tiers.items():
            stdout.print(f"{name}: {what} {objects:,} objects, {cell('removed_bytes', size)}")
        stdout.print(f"{tally.blocks:,} blocks {what}")
    for text in tally.missed:
        stderr.print(text)
    if tally.missed:
        raise typer.Exit(1)


def _held(cache: BlockCache) -> str:
    """What the tiers hold, in words."""
    held = [(name, state) for name, state in cache.stats().tiers.items() if state.objects]
    told = [
        f"{state.objects:,} objects, {cell('total_bytes', state.bytes)}, in {name}" for name, state in held
    ]
    return ", ".join(told) or "0 objects"
