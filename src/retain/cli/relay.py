"""`retain relay`: prefill on one server, decode on another."""

from __future__ import annotations

from typing import Annotated

import typer

from retain.errors import MissingDependency


def relay(
    decode: Annotated[
        list[str],
        typer.Option(metavar="URL", help="A server that answers. Repeatable.", show_default=False),
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A server that prefills. Repeatable.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8100,
    min_prompt: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="Shorter prompts go to the decode server at once.")
    ] = 256,
    prefill_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, help="After this the decode server computes the prompt."),
    ] = 60.0,
    decode_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, help="After such a silence the answer ends with an error."),
    ] = 300.0,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests under way at a time; others are refused.")
    ] = 256,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Listen beyond this machine, without any key of its own.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Prefill on one server, decode on another, over tiers that both share (docs/relay.md)."""
    try:
        from retain.relay import run_relay
        from retain.relay.relay import Limits
    except ImportError as error:
        raise MissingDependency(
            f"the relay needs {error.name or error}: pip install 'retain[serve]'"
        ) from error
    code = run_relay(
        prefill or [],
        decode,
        host,
        port,
        limits=Limits(min_prompt, prefill_timeout, decode_timeout, max_requests),
        allow_open=allow_open,
        log_level=log_level,
    )
    raise typer.Exit(code)
