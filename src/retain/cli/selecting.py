"""Options that select kept blocks, and the cache that a command about them works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retain.address import Rules, TierAddress, parse_duration
from retain.cli.daemons import client
from retain.cli.objects import check_folder
from retain.cli.prompts import Chains, read_prompts
from retain.config import Settings
from retain.errors import ConfigError

if TYPE_CHECKING:
    from retain.cache import BlockCache, Selection, Tally

Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Only blocks of this model: a folder, a GGUF file, smollm2, or a kin or variant in hex digits.",
        show_default=False,
    ),
]
Tenant = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only blocks of this tenant.", show_default=False)
]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only blocks stored so long ago, as in 7d.", show_default=False),
]
PrefixFile = Annotated[
    Path | None,
    typer.Option(
        "--prefix",
        metavar="FILE",
        help="Only the blocks of this text, or list of token ids in JSON, and what continues them.",
        show_default=False,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Only this block, in 64 hex digits. Repeatable."),
]


def selection(
    *,
    model: str | None,
    tenant: str | None,
    older_than: str | None,
    prefix: Path | None,
    keys: list[str] | None,
    beyond: bool = True,
) -> Selection:
    """The selection that options make. Raises ConfigError."""
    from retain.cache import Prefix, Selection

    digest = None if model is None else _digest(model)
    chains = None if model is None or digest is not None else Chains(model, tenant)
    which = Selection(
        keys=None if not keys else tuple(_key(text) for text in keys),
        kin=None if chains is None else chains.kin,
        tenant=tenant,
        older_than=None if older_than is None else parse_duration(older_than),
    )
    if prefix is None:
        return which
    if chains is None:
        raise ConfigError("tokens mean nothing without their model: with --prefix give --model MODEL")
    prompts = list(read_prompts([prefix]))
    if len(prompts) != 1:
        raise ConfigError(f"{prefix} has {len(prompts)} prompts; a prefix is one")
    return replace(which, prefix=Prefix.of(chains.of(prompts[0]), beyond=beyond))


def of_digest(which: Selection, model: str | None) -> list[Selection]:
    """The selections of which a command's is the sum: digits given for a model may be its kin or variant."""
    digest = None if model is None else _digest(model)
    return [which] if digest is None else [replace(which, kin=digest), replace(which, variant=digest)]


@contextmanager
def cache_of(settings: Settings) -> Iterator[BlockCache]:
    """The cache of the configured tiers: the daemon's that keeps them, where one runs; else one opened for
    this command over the tiers below memory. Raises ConfigError where there is nothing to look at.
    """
    from retain.daemon.start import socket_path

    found = client(socket_path(settings.tiers, settings.policy))
    if found is not None:
        with found:
            yield found
        return
    from retain.cache import open_cache

    below = [_bare(each) for each in settings.tiers if each.kind != "memory"]
    if not below:
        raise ConfigError("memory tiers end with their process, no daemon runs, and no other tier is named")
    for each in below:
        check_folder(each)
    with open_cache(*below, policy=settings.policy) as cache:
        yield cache


def _bare(address: TierAddress) -> TierAddress:
    """The tier without the rules that would have a mere look at it evict something."""
    return replace(address, capacity=None, rules=Rules())


def told(tally: Tally) -> dict[str, object]:
    """A tally as JSON has it."""
    tiers = [{"tier": name, "objects": n, "bytes": size} for name, (n, size) in tally.tiers.items()]
    return {
        "blocks": tally.blocks,
        "objects": tally.objects,
        "bytes": tally.bytes,
        "tiers": tiers,
        "missed": list(tally.missed),
    }


def added(tallies: list[Tally]) -> Tally:
    """Tallies of selections that have nothing in common, as one."""
    from retain.cache import Tally

    tiers: dict[str, tuple[int, int]] = {}
    for each in tallies:
        for name, (objects, size) in each.tiers.items():
            before = tiers.get(name, (0, 0))
            tiers[name] = (before[0] + objects, before[1] + size)
    return Tally(
        sum(each.blocks for each in tallies),
        sum(each.objects for each in tallies),
        sum(each.bytes for each in tallies),
        tiers,
        tuple(dict.fromkeys(text for each in tallies for text in each.missed)),
    )


def _digest(text: str) -> bytes | None:
    """The digest that 64 hex digits are, None for another text."""
    try:
        return bytes.fromhex(text) if len(text) == 64 else None
    except ValueError:
        return None


def _key(text: str) -> bytes:
    key = _digest(text)
    if key is None:
        raise ConfigError(f"{text!r} is not a key: write its 64 hex digits, as in `retain ls --json`")
    return key
