"""`retain show KEY`: a block's header and the text it stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from retain.bench.report import cell
from retain.cli.objects import Listed, disk_tiers, listed, read
from retain.cli.options import Json, Model, Tiers, settings
from retain.cli.terminal import age, stdout
from retain.errors import ConfigError, InvalidObject, RetainError
from retain.model import runs

if TYPE_CHECKING:
    from retain.header import BlockHeader
    from retain.identity import Tokens

SHOWN_TOKENS = 32
"""Token ids that are printed where there is no text."""


def show(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The beginning of a block's key, as `retain ls` prints it.")],
    tier: Tiers = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Print the header of a block, and its text where the model that made it is at hand."""
    chosen = settings(context, tiers=tier, model=model)
    with disk_tiers(chosen.tiers) as tiers:
        found = [each for each in listed(tiers) if each.stored.name.startswith(key.lower())]
        if not found:
            raise ConfigError(f"no object's key begins with {key!r}; `retain ls` lists them")
        keys = sorted({each.stored.name.partition(".")[0] for each in found})
        if len(keys) > 1:
            raise ConfigError(
                f"{len(keys)} keys begin with {key!r}, such as {keys[0][:24]} and {keys[1][:24]}"
            )
        # One block may be kept several times: by codec, variant or slice.
        for each in found:
            _show(each, chosen.model, as_json)


def _show(each: Listed, model: str, as_json: bool) -> None:
    from retain.block import verify_object

    try:
        frame, arrays = verify_object(read(each.tier.store, each.stored.name, each.stored.size))
    except InvalidObject as error:
        raise InvalidObject(f"{each.stored.name} in {each.tier.path} is damaged: {error}") from error
    header, tokens = frame.header, arrays["tokens"]
    text, reason = text_of(header, tokens, model)
    if as_json:
        fields = dict(_fields(each, header))
        print(json.dumps({**fields, "token_ids": tokens.tolist(), "text": text, "no_text_because": reason}))
        return
    table = Table("", Column("", overflow="fold"), show_header=False)
    for name, value in _fields(each, header):
        table.add_row(name, escape(value))
    stdout.print(table)
    if text is not None:
        stdout.print(Panel(escape(text), title="text", title_align="left"))
        return
    ids = " ".join(map(str, tokens[:SHOWN_TOKENS].tolist()))
    more = f" ... and {tokens.size - SHOWN_TOKENS} more" if tokens.size > SHOWN_TOKENS else ""
    stdout.print(Panel(ids + more, title="token ids", title_align="left"))
    stdout.print(f"No text: {reason}", markup=False, soft_wrap=True)


def text_of(header: BlockHeader, tokens: Tokens, model: str) -> tuple[str | None, str | None]:
    """The block's text by the tokenizer of `model`, or None and the reason why that cannot be told."""
    from retain.fingerprint import kin_of_files
    from retain.models import find

    try:
        source = find(model)
        if kin_of_files(source.path) != header.kin:
            return None, (
                f"the block is of {header.model}, kin {header.kin.hex()[:16]}, "
                f"and the model {model} is of another kin; name the right one by --model"
            )
        from retain.engines.transformers.loading import load_tokenizer

        return str(load_tokenizer(source).decode(tokens.tolist(), clean_up_tokenization_spaces=False)), None
    except RetainError as error:
        return None, str(error)


def _fields(each: Listed, header: BlockHeader) -> list[tuple[str, str]]:
    return [
        ("object", each.stored.name),
        ("tier", f"disk:{each.tier.path}"),
        ("size", f"{each.stored.size} bytes ({cell('size_bytes', each.stored.size)})"),
        ("kept", f"{age(each.stored.modified)} ago"),
        ("key", header.key.hex()),
        ("parent", header.parent.hex()),
        ("space", header.space.hex()),
        ("content key", header.content.hex()),
        ("model", f"{header.model} ({header.architecture})"),
        ("kin", header.kin.hex()),
        ("variant", header.variant.hex()),
        ("adapter", header.adapter.hex() if header.adapter is not None else "none"),
        ("tokens", f"{header.count}, positions {header.first} to {header.first + header.count - 1}"),
        ("layers", "; ".join(_layers(header))),
        ("dtype", header.dtype),
        ("slice", header.slice.text),
        ("media", str(len(header.media))),
        ("codec", " ".join(filter(None, (header.codec, header.parameters)))),
        ("fidelity", header.fidelity),
        ("lineage", header.lineage.hex() if header.lineage is not None else "exact prefix"),
        ("producer", header.producer),
    ]


def _layers(header: BlockHeader) -> list[str]:
    lines = []
    for count, layer in runs(tuple(replace(layer, rope=None) for layer in header.layers)):
        window = f", window {layer.window}" if layer.window else ""
        lines.append(f"{count} {layer.kind}{window}: {layer.heads} heads, K {layer.k_dim}, V {layer.v_dim}")
    ropes = {layer.rope for layer in header.layers if layer.rope is not None}
    lines += sorted(
        f"RoPE base {rope.theta:g} on {rope.rotary_dim}, scaling {rope.scaling}" for rope in ropes
    )
    return lines
