"""The commands put together. Heavy imports wait until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retain.cli import (
    bench,
    clear,
    config,
    daemon,
    demo,
    doctor,
    ls,
    pin,
    profile,
    relay,
    serve,
    show,
    stats,
    status,
    stop,
    verify,
    warm,
)

app = typer.Typer(
    help="Retain keeps what inference engines compute and throw away: the KV cache.",
    epilog="Exit codes: 0 done; 1 done, and something is bad (a damaged object, a failed check); 2 not done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Read settings from this file.", show_default=False),
    ] = None,
) -> None:
    context.obj = file


app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("relay")(relay.relay)
app.command("daemon")(daemon.daemon)
app.command("status")(status.status)
app.command("stop")(stop.stop)
app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("clear")(clear.clear)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("warm")(warm.warm)
app.command("stats")(stats.stats)
app.command("doctor")(doctor.doctor)
app.command("profile")(profile.profile)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
