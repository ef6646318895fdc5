"""`retain demo`: a real model answers questions about a long program, with a restart in between."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from retain.bench.report import Report, cell, save_figure
from retain.cli.options import Json, Plot
from retain.cli.terminal import BAD, stderr, stdout

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Keep the KV and the server's log here.", show_default=False),
]


def demo(as_json: Json = False, plot: Plot = None, folder: Folder = None) -> None:
    """Ask a real model about a long program: cold, warm, and warm from disk after a restart.

    Exit 1 if an answer differs from the answer without Retain, or if nothing was reused.
    """
    from retain.bench import demo as bench

    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="retain-demo-")))
        place.mkdir(parents=True, exist_ok=True)
        report = bench.run(place, lambda text: stderr.print(text, style="dim", markup=False, soft_wrap=True))
    if as_json:
        print(report.json())
    else:
        _print(report)
    if plot is not None:
        save_figure(bench.plot(report), plot)
    if not report.passed:
        raise typer.Exit(BAD)


def _print(report: Report) -> None:
    table = Table(title="What Retain saved", title_justify="left")
    for column in ("", "first token", "computed", "from memory", "from disk", "saved", "answer equal"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report.rows:
        table.add_row(
            str(row["stage"]),
            cell("ttft_seconds", row["ttft_seconds"]),
            f"{row['computed_tokens']:,} tokens",
            f"{row['memory_tokens']:,} tokens",
            f"{row['disk_tokens']:,} tokens",
            cell("saved_seconds", row["saved_seconds"]),
            "[green]yes[/]" if row["answer_equal"] else "[bold red]no[/]",
        )
    stdout.print(table)
    for row in report.rows:
        stdout.print(f"[bold]{escape(str(row['question']))}[/] {escape(str(row['answer']).strip())}")
        if not row["answer_equal"]:
            stdout.print(f"[bold red]without Retain:[/] {escape(str(row['answer_without_retain']).strip())}")
    saved = report.ratios["demo.saved_seconds"]
    warm, restarted = report.ratios["demo.cold_over_memory"], report.ratios["demo.cold_over_restart"]
    stdout.print(
        f"\n{saved:.1f} seconds saved; the first token came {warm:.0f} times sooner from memory "
        f"and {restarted:.0f} times sooner from disk after the restart."
    )
