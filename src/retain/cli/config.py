"""`retain config show`: every setting with its value and the place the value comes from."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import typer
from rich.table import Column, Table

from retain.address import TierAddress
from retain.cli.options import Json, resolved
from retain.cli.terminal import stdout
from retain.config import Settings, variable_of

app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)


@app.callback()
def group() -> None:
    pass


@app.command("show")
def show(context: typer.Context, as_json: Json = False) -> None:
    """Print each setting with its value and where the value comes from."""
    found = resolved(context)
    shown = {
        field.name: _plain(field.name, getattr(found.settings, field.name)) for field in fields(Settings)
    }
    if as_json:
        print(json.dumps({name: {"value": shown[name], "source": found.sources[name]} for name in shown}))
        return
    table = Table("setting", Column("value", overflow="fold"), Column("source", overflow="fold"), "variable")
    for name, value in shown.items():
        text = "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        table.add_row(name, text, found.sources[name], variable_of(name))
    stdout.print(table)


def _plain(name: str, value: object) -> object:
    """The value as JSON can hold it; of secrets only that they are set."""
    if name in ("api_keys", "admin_key"):
        keys = value if isinstance(value, tuple) else () if value is None else (value,)
        return ["(set)" for _ in keys]
    if isinstance(value, tuple):
        return [str(item) if isinstance(item, TierAddress) else item for item in value]
    return str(value) if isinstance(value, Path) else value
