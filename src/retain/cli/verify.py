"""`retain verify`: reads every object of the disk tiers and names the bad ones with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.progress import Progress

from retain.cli.objects import disk_tiers, read
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import BAD, stderr, stdout
from retain.errors import ForeignObject, InvalidObject, StoreUnavailable
from retain.stores.base import Store, StoredObject

Delete = Annotated[bool, typer.Option("--delete", help="Remove the bad objects.")]


def verify(context: typer.Context, tier: Tiers = None, delete: Delete = False, as_json: Json = False) -> None:
    """Check every object: checksums, name, token ids against the key, decoding. Exit 1 if any is bad."""
    bad: list[dict[str, object]] = []
    checked = 0
    with (
        disk_tiers(settings(context, tiers=tier).tiers) as tiers,
        Progress(console=stderr, transient=True) as progress,
    ):
        for each in tiers:
            objects = list(each.store.scan())
            for stored in progress.track(objects, description=f"verifying {each.path}"):
                checked += 1
                problem = problem_of(each.store, stored)
                if problem is not None:
                    # What cannot be read here, for want of a key or of a newer version, may be intact.
                    removed = delete and problem.damaged and each.store.delete(stored.name)
                    bad.append(
                        {
                            "name": stored.name,
                            "tier": f"disk:{each.path}",
                            "problem": problem.text,
                            "removed": removed,
                        }
                    )
    if as_json:
        print(json.dumps({"checked": checked, "bad": bad}))
    else:
        for row in bad:
            stdout.print(
                f"[red]bad[/] {row['name']}: {row['problem']}{' (removed)' if row['removed'] else ''}",
                soft_wrap=True,
            )
        stdout.print(f"{checked} objects checked, {len(bad)} bad")
    if bad:
        raise typer.Exit(BAD)


@dataclass(frozen=True)
class Problem:
    """What is wrong with an object, and whether that means that it is damaged."""

    text: str
    damaged: bool = True


def problem_of(store: Store, stored: StoredObject) -> Problem | None:
    """What is wrong with one object; None for an intact one."""
    from retain.block import decode

    try:
        header = decode(read(store, stored.name, stored.size)).header
    except (ForeignObject, StoreUnavailable) as error:
        return Problem(str(error), damaged=False)
    except InvalidObject as error:
        return Problem(str(error))
    kept_as = stored.name.split(".")
    says = header.name.split(".")
    # A decoded block is raw again: the codec's place in the name is the one part that may differ.
    if kept_as[:3] + kept_as[4:] != says[:3] + says[4:]:
        return Problem(f"the object lies under another object's name; its own begins with {says[0][:16]}")
    return None
