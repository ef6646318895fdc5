"""`retain bench NAME`: measurements, printed as tables, as one JSON object, or drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retain.bench.report import Report, save_figure, tables
from retain.cli.options import Json, Model, Plot, settings
from retain.cli.terminal import BAD, stdout
from retain.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(help="Measure Retain beside its peers and limits.", no_args_is_help=True)

Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Folder of traces and texts (RETAIN_DATA).", show_default=False
    ),
]


@app.command("store")
def store(
    tier: Annotated[
        str, typer.Option(metavar="LIST", help="Of memory, disk, redis, http and object, with commas.")
    ] = "memory,disk",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="The Python of a venv with LMCache, to measure its files beside the disk tier.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Each tier beside the bare calls and clients it rests on, per second of CPU time.

    Servers for remote tiers are started here where they are installed.
    """
    from retain.bench import store as bench

    report = bench.run(tiers=[each.strip() for each in tier.split(",")], peers=peers)
    finish(report, bench.plot, as_json, plot)


@app.command("keys")
def keys(as_json: Json = False, plot: Plot = None) -> None:
    """Keys of a prompt beside plain SHA-256; the index at a million blocks."""
    from retain.bench import keys as bench

    finish(bench.run(), bench.plot, as_json, plot)


@app.command("trace")
def trace(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Option(
            "--trace",
            metavar="NAME",
            help="mooncake-conversation, mooncake-synthetic, weka, weka-eighth, or a file.",
        ),
    ] = "mooncake-conversation",
    capacity: Annotated[
        list[int] | None, typer.Option(help="Capacity in blocks. Repeatable.", show_default=False)
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="One of those listed in docs/eviction.md. Repeatable.", show_default=False),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="With the default policy: also for blocks coded at this level. Repeatable.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    data: Data = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Hit rates of the eviction policies on traces of real requests, below Belady's optimum.

    With --codec: the hit rate that the same bytes buy, by what the model's profile says of its blocks' size.
    """
    from retain.bench import trace as bench
    from retain.bench import trace_codec
    from retain.fingerprint import kin_of_files
    from retain.models import find

    chosen = settings(context, model=model, data=data)
    if codec:
        if policy:
            raise ConfigError("--codec goes with the default policy: leave --policy out")
        kin = kin_of_files(find(chosen.model).path)
        report = trace_codec.run(name, chosen.data, kin, codec, capacity or ())
        finish(report, trace_codec.plot, as_json, plot)
        return
    report = bench.run(name, chosen.data, capacity or (), policy or ())
    finish(report, bench.plot, as_json, plot)


@app.command("codec")
def codecs(
    context: typer.Context,
    model: Model = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A text to judge by. Repeatable.", show_default=False),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="The Python of a venv with LMCache.", show_default=False),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Judge this one: fp8, near, cachegen ... Repeatable.", show_default=False),
    ] = None,
    data: Data = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Bits a value of every codec, and what it does to the model's next tokens, on prose, code, dialogue and
    tables.

    Needs a profile of the model: `retain profile`.
    """
    from retain.bench import codec as bench

    chosen = settings(context, model=model, data=data)
    report = bench.run(chosen.model, text or (), chosen.data, peers, codec or ())
    finish(report, bench.plot, as_json, plot)


@app.command("ttft")
def ttft(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    engine: Annotated[str, typer.Option(help="transformers, llamacpp or vllm.")] = "transformers",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="With vllm: the Python of a venv with LMCache; default: .venv-peers, see make peers.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Time to the first token: cold, warm from memory, after a restart from disk; and what a miss costs."""
    from retain.bench import ttft as bench

    if engine == "vllm":
        from retain.bench import vllm_ttft

        report = vllm_ttft.run(tokens, peers)
    elif engine == "llamacpp":
        from retain.bench import llamacpp_ttft

        report = llamacpp_ttft.run(tokens)
    elif engine == "transformers":
        report = bench.run(tokens)
    else:
        raise ConfigError(f"no engine {engine!r} is measured; known are transformers, llamacpp and vllm")
    finish(report, bench.plot, as_json, plot)


@app.command("planner")
def planner(as_json: Json = False, plot: Plot = None) -> None:
    """Load or recompute over slow and fast links, beside always loading and never."""
    from retain.bench import planner as bench

    finish(bench.run(), bench.plot, as_json, plot)


@app.command("chaos")
def chaos(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds of everything: under 5 minutes.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Faults with this in their name. Repeatable.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="What the dice start from.")] = 1,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON", help="The Python of a venv with vLLM, to kill that too.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Kill, stop, cut, fill and damage everything while clients check every byte and time every wait."""
    from retain.bench import chaos as bench

    finish(bench.run(quick, only or (), seed, vllm), bench.plot, as_json, plot)


@app.command("dialogues")
def dialogues(
    context: typer.Context,
    count: Annotated[int, typer.Option("--dialogues", min=1, help="How many dialogues.")] = 40,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Of each the first so many turns.", show_default=False)
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 16,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Real dialogues replayed turn by turn against vLLM, with Retain and without: answers, share served."""
    from retain.bench import dialogues as bench

    finish(bench.run(settings(context, data=data).data, count, turns, answer_tokens), as_json=as_json)


@app.command("relay")
def relay(
    tokens: Annotated[int, typer.Option(min=64, help="Length of the longest prompt.")] = 4096,
    prefill: Annotated[str, typer.Option(help="vllm, transformers or llamacpp.")] = "vllm",
    decode: Annotated[str, typer.Option(help="vllm, transformers or llamacpp.")] = "vllm",
    as_json: Json = False,
) -> None:
    """Time to the first token through the relay, beside the prefill and the decode server alone."""
    from retain.bench import relay as bench

    finish(bench.run(tokens, prefill, decode), as_json=as_json)


@app.command("portability")
def portability(
    tokens: Annotated[
        list[int] | None, typer.Option(help="Length of the texts. Repeatable.", show_default=False)
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts of each length.")] = 3,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, llamacpp, llamacpp-f16, llamacpp-q4 or vllm; all by default. Repeatable.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="ENGINE=PATH",
            help="The Python of another environment that has an engine. Repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """KV of every engine continued by every other: KL against the reader's own prefill, beside its noise."""
    from retain.bench import portability as bench
    from retain.cli.handshakes import chosen

    report = bench.run(tokens or (1000, 4000), texts, chosen(python or ()), engine or ())
    finish(report, bench.plot, as_json, plot)


def finish(
    report: Report,
    draw: Callable[[Report], Figure] | None = None,
    as_json: bool = False,
    plot: Path | None = None,
) -> None:
    """Print and draw a report; exit 1 if one of its checks failed."""
    if as_json:
        print(report.json())
    else:
        for table in tables(report):
            stdout.print(table)
    if draw is not None and plot is not None:
        save_figure(draw(report), plot)
    if not report.passed:
        raise typer.Exit(BAD)
