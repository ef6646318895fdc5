"""`retain serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retain.address import TierAddress
from retain.cli.options import Quotas, Tiers, Ttls, settings
from retain.errors import MissingDependency

NOTHING = TierAddress("memory", capacity=0)
"""A tier that keeps nothing: every request is computed as if Retain were not there."""


def serve(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a GGUF file, or smollm2 for the packaged model.",
            show_default=False,
        ),
    ] = None,
    tier: Tiers = None,
    quota: Quotas = None,
    ttl: Ttls = None,
    no_daemon: Annotated[
        bool, typer.Option("--no-daemon", help="Keep the KV in this process, not in the node's daemon.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Serve without keeping any KV.")] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.", show_default=False)] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KEY", help="A tenant and its key. Repeatable.", show_default=False),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="More of them, one a line.", show_default=False)
    ] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Listen beyond this machine without any API key.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="What is evicted first: reuse-leaf, lru-leaf or lru.", show_default=False),
    ] = None,
    audit: Annotated[
        float | None, typer.Option(help="Share of hits that are recomputed and compared.", show_default=False)
    ] = None,
    fidelity: Annotated[
        str | None,
        typer.Option(
            help="The lowest accepted of kept KV: exact, kin, or a level as near.", show_default=False
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name to clients.", show_default=False)] = None,
    engine: Annotated[
        str, typer.Option(help="transformers, or llamacpp for a GGUF file: faster on a CPU.")
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of the KV: float32, bfloat16 or float16; by default float32, with llamacpp float16.",
            show_default=False,
        ),
    ] = None,
    interchange: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="float16 keeps float32 KV in half the bytes.", show_default=False),
    ] = None,
    flash: Annotated[
        bool | None,
        typer.Option("--flash/--no-flash", help="With llamacpp: flash attention, by default on."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="TOKENS",
            min=1,
            help="With llamacpp: the most of prompt and answer.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model through the OpenAI API, keeping and reusing its KV."""
    chosen = settings(
        command,
        model=model,
        tiers=tier,
        quotas=quota,
        ttls=ttl,
        host=host,
        port=port,
        api_keys=api_key,
        policy=policy,
        audit=audit,
        fidelity=fidelity,
    )
    try:
        from retain.gateway import EngineOptions, run_server
    except ImportError as error:
        raise MissingDependency(
            f"the server needs {error.name}: pip install 'retain[serve,transformers]'"
        ) from error
    code = run_server(
        chosen.model,
        [NOTHING] if no_cache else chosen.tiers,
        chosen.host,
        chosen.port,
        api_keys=chosen.api_keys,
        api_key_file=api_key_file,
        allow_open=allow_open,
        served_name=name,
        engine=engine,
        options=EngineOptions(dtype, interchange, flash, context),
        policy=chosen.policy,
        daemon=not (no_daemon or no_cache),
        audit=chosen.audit,
        fidelity=chosen.fidelity,
        log_level=log_level,
    )
    raise typer.Exit(code)
