"""`retain daemon`: keeps the node's cache in a process of its own, in the foreground."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from retain.cli.options import Quotas, Tiers, Ttls, settings


def daemon(
    context: typer.Context,
    tier: Tiers = None,
    quota: Quotas = None,
    ttl: Ttls = None,
    policy: Annotated[
        str | None,
        typer.Option(help="What is evicted first: reuse-leaf, lru-leaf or lru.", show_default=False),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Listen here, not in the runtime folder.", show_default=False),
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End after so long without clients.", show_default=False),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve /metrics and /health over HTTP.", show_default=False),
    ] = None,
    http_host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to serve them.")] = "127.0.0.1",
    http_token: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            help="Serve and take blocks too, for whoever has this token: file:PATH or env:NAME.",
            show_default=False,
        ),
    ] = None,
    http_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="A certificate: serve with TLS.", show_default=False)
    ] = None,
    http_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The certificate's key.", show_default=False)
    ] = None,
) -> None:
    """Keep the node's cache for every engine on it, until stopped.

    Engines start it on demand; by hand or under systemd it runs for as long as it is wanted.
    """
    from retain.daemon.__main__ import run
    from retain.stores.opening import secret

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = settings(context, tiers=tier, quotas=quota, ttls=ttl, policy=policy)
    code = run(
        chosen.tiers,
        chosen.policy,
        socket=socket,
        idle=idle,
        http=http,
        http_host=http_host,
        http_token=None if http_token is None else secret(http_token),
        http_cert=http_cert,
        http_key=http_key,
    )
    raise typer.Exit(code)
