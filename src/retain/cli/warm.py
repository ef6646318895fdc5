"""`retain warm`: brings prompts up into the daemon's memory, or has a server compute what is not kept."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from retain.bench.report import cell
from retain.cli.daemons import client
from retain.cli.options import Json, Tiers, settings
from retain.cli.prompts import Chains, Prompt, read_prompts
from retain.cli.terminal import stderr, stdout
from retain.config import Settings
from retain.errors import ConfigError, StoreUnavailable

STEP = 64
"""Blocks that are brought up at a time, so that the bar moves."""

COMPUTE_SECONDS = 600.0
"""How long one prompt is waited for, at the most."""


def warm(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model: a folder, a GGUF file, or smollm2.")],
    files: Annotated[
        list[Path],
        typer.Argument(help="A text each; .json and .jsonl: texts or lists of token ids."),
    ],
    tier: Tiers = None,
    tenant: Annotated[str | None, typer.Option(help="Whose blocks.", show_default=False)] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="The cache_salt of the requests.", show_default=False)
    ] = None,
    compute: Annotated[
        bool, typer.Option("--compute", help="Have the running server compute what is not kept.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server; else the configured one.", show_default=False),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="SECRET", help="The API key: file:PATH or env:NAME.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring what is kept of these prompts in lower tiers up into memory, before anybody asks for it.

    With --compute the texts go to a running `retain serve`, whose tokenizer and tenants then count; without,
    to the daemon of the configured tiers. Stops where memory is full. Exits with 1 where some are missing.
    """
    prompts = list(read_prompts(files))
    chosen = settings(context, tiers=tier)
    if compute:
        if tenant is not None:
            raise ConfigError("a server knows its tenants by their keys: give --key in place of --tenant")
        told = _compute(prompts, server or f"http://{chosen.host}:{chosen.port}", key, cache_salt)
    else:
        told = _bring_up(prompts, Chains(model, tenant, cache_salt), chosen)
    if as_json:
        print(json.dumps(told))
    else:
        stdout.print(
            ", ".join(f"{name.replace('_', ' ')} {_shown(name, value)}" for name, value in told.items())
        )
    if told.get("missing_blocks") or told.get("left_prompts"):
        raise typer.Exit(1)


def _bring_up(prompts: Sequence[Prompt], chains: Chains, chosen: Settings) -> dict[str, int]:
    from retain.daemon.start import socket_path

    cache = client(socket_path(chosen.tiers, chosen.policy))
    if cache is None:
        raise ConfigError(
            "memory is the daemon's, and none keeps these tiers; engines start one, or run: retain daemon"
        )
    told = {"prompts": 0, "blocks": 0, "from_memory": 0, "from_below": 0, "bytes": 0, "missing_blocks": 0}
    with cache, _bar() as bar:
        room = cache.stats().tiers["memory"].capacity
        made = [(each, chains.of(each)) for each in prompts]
        task = bar.add_task("", total=sum(len(chain.keys) for _, chain in made))
        for prompt, chain in made:
            bar.update(task, description=prompt.place)
            for at in range(0, len(chain.keys), STEP):
                keys = chain.keys[at : at + STEP]
                if told["bytes"] >= room:
                    told["missing_blocks"] += len(keys)
                    continue
                tally = cache.warm(keys)
                resident = tally.tiers.get("memory", (0, 0))[0]
                told["blocks"] += tally.blocks
                told["from_memory"] += resident
                told["from_below"] += tally.objects - resident
                told["bytes"] += tally.bytes
                told["missing_blocks"] += len(keys) - tally.blocks
                bar.advance(task, len(keys))
            told["prompts"] += 1
    return told


def _compute(prompts: Sequence[Prompt], url: str, key: str | None, salt: str | None) -> dict[str, int]:
    from retain.stores.opening import secret

    server = _Server(url, None if key is None else secret(key))
    name = server.ask("GET", "/v1/models")["data"][0]["id"]
    told = {"prompts": 0, "tokens": 0, "reused_tokens": 0, "computed_tokens": 0, "left_prompts": 0}
    with _bar() as bar:
        task = bar.add_task("", total=len(prompts))
        for prompt in prompts:
            bar.update(task, description=prompt.place)
            body: dict[str, Any] = {"model": name, "max_tokens": 1, "temperature": 0}
            body["prompt"] = prompt.text if prompt.tokens is None else list(prompt.tokens)
            if salt is not None:
                body["cache_salt"] = salt
            try:
                usage = server.ask("POST", "/v1/completions", body)["usage"]
            except StoreUnavailable as error:
                stderr.print(f"{prompt.place}: {error}")
                told["left_prompts"] += 1
            else:
                reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                told["prompts"] += 1
                told["tokens"] += usage["prompt_tokens"]
                told["reused_tokens"] += reused
                told["computed_tokens"] += usage["prompt_tokens"] - reused
            bar.advance(task)
    return told


class _Server:
    """A running OpenAI-compatible server. Calls raise StoreUnavailable."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of a server; write http://HOST:PORT")
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        where = (self._parts.hostname or "", self._parts.port)
        connection = (
            http.client.HTTPSConnection(*where, timeout=COMPUTE_SECONDS, context=ssl.create_default_context())
            if self._parts.scheme == "https"
            else http.client.HTTPConnection(*where, timeout=COMPUTE_SECONDS)
        )
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                told = text[:300].decode("utf-8", "replace")
                raise StoreUnavailable(f"the server answers {answer.status}: {told}")
            return json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreUnavailable(f"the server at {self._parts.netloc} cannot be asked: {error}") from error
        finally:
            connection.close()


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True)


def _shown(name: str, value: int) -> str:
    return cell("total_bytes", value) if name == "bytes" else f"{value:,}"
