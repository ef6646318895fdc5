"""Options that several commands share, and the settings that come of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retain.config import Resolved, Settings, resolve

Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="ADDRESS",
        help="A tier instead of the configured ones: memory:4GiB or disk:PATH?capacity=50GiB. Repeatable.",
        show_default=False,
    ),
]
Quotas = Annotated[
    list[str] | None,
    typer.Option(
        "--quota",
        metavar="[NAME=]SIZE",
        help="The most that a tenant may have in each of this host's tiers; without a name, each tenant.",
        show_default=False,
    ),
]
Ttls = Annotated[
    list[str] | None,
    typer.Option(
        "--ttl",
        metavar="[NAME=]TIME",
        help="How long blocks are kept, as in 7d; with a name, that tenant's.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw a chart into this file.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A folder, a GGUF file, or smollm2 for the packaged model.",
        show_default=False,
    ),
]


def resolved(context: typer.Context, **flags: object) -> Resolved:
    """The settings in force and their sources: the flags given to this command over everything else."""
    return resolve(flags, file=context.obj)


def settings(context: typer.Context, **flags: object) -> Settings:
    """The settings in force."""
    return resolved(context, **flags).settings
