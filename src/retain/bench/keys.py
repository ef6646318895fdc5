"""Bench `keys`: what it costs to hash a prompt into keys, and to look them up among a million blocks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from retain._native import Index
from retain.bench.clock import Contender, interleaved
from retain.bench.progress import Steps
from retain.bench.report import Report, Value, new_figure
from retain.identity import BLOCK_TOKENS, chain, space_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPT_TOKENS = 32_768
BLOCKS = 1_000_000
ROUNDS = 200
_CHAIN_BLOCKS = 64
"""Blocks a prompt in the filled index: prompts of 16k tokens."""


def run(blocks: int = BLOCKS, rounds: int = ROUNDS) -> Report:
    """Time the keys of a 32k-token prompt, and its lookup in an index of `blocks` blocks."""
    with Steps("keys", 3) as steps:
        steps.step("hashing", 0)
        tokens = np.random.default_rng(0).integers(0, 49_152, PROMPT_TOKENS).astype(np.uint32)
        space = space_of(bytes(32))
        data = tokens.tobytes()
        hashing = interleaved(
            {
                "retain": Contender(lambda turn: chain(space, tokens)),
                "sha256": Contender(lambda turn: hashlib.sha256(data).digest()),
            },
            rounds,
            warmups=10,
        )
        steps.step(f"filling an index with {blocks:,} blocks")
        index = filled(blocks)
        prompt = chain(space, tokens)
        parent = prompt.root
        for key in prompt.keys:
            index.insert(key, 0, 0, parent, 1 << 22)
            parent = key
        joined = b"".join(prompt.keys)
        steps.step("looking up")
        # Other prompts are looked up in between, so that the prompt's records are not in the caches.
        others = [index_keys(number) for number in range(256)]
        looking = interleaved(
            {
                "lookup": Contender(
                    lambda turn: index.lookup(joined, [0]),
                    lambda turn: [index.lookup(keys, [0]) for keys in others],
                ),
                "keys and lookup": Contender(
                    lambda turn: index.lookup(b"".join(chain(space, tokens).keys), [0]),
                    lambda turn: [index.lookup(keys, [0]) for keys in others],
                ),
            },
            rounds,
            warmups=10,
        )
        found = int((index.lookup(joined, [0]) != 0xFFFFFFFF).sum())
        steps.step("done")
    rows: list[dict[str, Value]] = [
        _row("keys of a prompt", hashing["retain"].seconds),
        _row("plain SHA-256 of its tokens", hashing["sha256"].seconds),
        _row(f"lookup among {len(index):,} blocks", looking["lookup"].seconds),
        _row("keys and lookup", looking["keys and lookup"].seconds),
    ]
    per_block = index.nbytes / len(index)
    return Report(
        "keys",
        rows,
        {
            "keys.seconds_per_32k": hashing["retain"].seconds,
            "keys.over_sha256": hashing["sha256"].seconds / hashing["retain"].seconds,
            "keys.index_bytes_per_block": per_block,
            "keys.lookup_seconds_per_32k": looking["keys and lookup"].seconds,
        },
        {
            "keys_of_32k_within_2_ms": hashing["retain"].seconds < 2e-3,
            "index_within_200_bytes_a_block": per_block < 200,
            "lookup_of_32k_within_5_ms": looking["keys and lookup"].seconds < 5e-3,
            "whole_prompt_found": found == PROMPT_TOKENS // BLOCK_TOKENS,
        },
    )


def filled(blocks: int) -> Index:
    """An index of prompts of 64 blocks each."""
    index = Index("lru-leaf")
    for number in range(blocks // _CHAIN_BLOCKS):
        keys = index_keys(number)
        parent = b"\xff" * 32
        for at in range(0, len(keys), 32):
            key = keys[at : at + 32]
            index.insert(key, 0, 0, parent, 1 << 22)
            parent = key
    return index


def index_keys(number: int) -> bytes:
    """The keys of prompt `number` of a filled index: 64 digests."""
    seeds = (f"{number}/{block}".encode() for block in range(_CHAIN_BLOCKS))
    return b"".join(hashlib.sha256(seed).digest() for seed in seeds)


def _row(what: str, seconds: float) -> dict[str, Value]:
    return {
        "what": what,
        "prompt_tokens": PROMPT_TOKENS,
        "median_seconds": seconds,
        "tokens_per_second": PROMPT_TOKENS / seconds,
    }


def plot(report: Report) -> Figure:
    """Milliseconds for a 32k-token prompt, one bar a row."""
    figure, axes = new_figure(height=3.2)
    names = [str(row["what"]) for row in report.rows]
    values = [1e3 * float(row["median_seconds"] or 0) for row in report.rows]
    bars = axes.barh(names[::-1], values[::-1])
    axes.bar_label(bars, fmt="%.2f ms", padding=3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds for 32,768 tokens")
    axes.set_title("Finding a prompt's KV", loc="left")
    return figure
