"""`retain profile`: learn what the lossy codecs need to know of a model, and keep it on this machine."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from retain.bench.progress import Steps
from retain.bench.report import cell
from retain.cli.options import Json, Tiers, settings
from retain.cli.terminal import stdout


def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a GGUF file, or smollm2 for the packaged model.", show_default=False),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Learn from this text instead of Python's own. Repeatable.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Narrower parts: coding takes a quarter of the time, and more bits."),
    ] = False,
    noise: Annotated[
        bool,
        typer.Option("--noise", help="Find what errors cost by trying, for engines without gradients."),
    ] = False,
    stored: Annotated[
        bool, typer.Option("--stored", help="Also learn from the blocks that the disk tiers hold.")
    ] = False,
    tier: Tiers = None,
    as_json: Json = False,
) -> None:
    """Learn a model's profile, with which `codec=near` and the other levels code its KV.

    Takes some minutes. Objects name the profile that they were coded with: keep old ones as long as their
    objects.
    """
    from retain.codecs.ladder import shelf
    from retain.engines.transformers.loading import load
    from retain.engines.transformers.study import Study
    from retain.profile.learn import FAST_WIDTH, WIDTH
    from retain.profile.make import TEXT_TOKENS, TEXTS, make, steps
    from retain.profile.stored import stored_samples
    from retain.profile.texts import calibration, from_files

    chosen = settings(context, model=model, tiers=tier)
    loaded = load(chosen.model)
    encode = loaded.tokenizer.encode
    texts = from_files(encode, text, TEXT_TOKENS) if text else calibration(encode, TEXTS, TEXT_TOKENS)
    started = time.perf_counter()
    with Steps("profile", steps(len(texts))) as bar, ExitStack() as open_tiers:
        kept = []
        if stored:
            from retain.cli.objects import disk_tiers

            disks = open_tiers.enter_context(disk_tiers(chosen.tiers))
            most = TEXTS * TEXT_TOKENS
            kept = list(stored_samples(loaded.spec, [each.store for each in disks], most))
        made = make(Study(loaded), texts, FAST_WIDTH if fast else WIDTH, bar.step, noise=noise, stored=kept)
    path = shelf.keep(made)
    seconds = time.perf_counter() - started
    if as_json:
        print(
            json.dumps(
                {
                    "model": made.model, "digest": made.digest.hex(), "file": str(path),
                    "bytes": path.stat().st_size, "seconds": seconds,
                    "levels": {name: {"kl": kl, "bits": bits} for name, (kl, bits) in made.declared.items()},
                }
            )
        )  # fmt: skip
        return
    table = Table("level", "bits a value", "ratio to fp16", "mean KL")
    for name, (kl, bits) in made.declared.items():
        table.add_row(name, f"{bits:.3f}", f"{16 / bits:.2f}", f"{kl:.1e}")
    stdout.print(table)
    size = cell("file_bytes", path.stat().st_size)
    stdout.print(
        f"{made.model}: profile {made.digest.hex()[:16]}, {size}, learned in {seconds:.0f} s: {path}"
    )
