"""Blocks whose bytes are a function of their key, so that a reader knows wrong bytes when it sees them."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from retain.block import Block, array_shapes, block_of, make_header, raw_layout
from retain.cache import Loaded
from retain.header import BlockHeader
from retain.identity import Chain, chain, space_of
from retain.model import LayerSpec, ModelSpec

SPEC = ModelSpec(
    name="chaos",
    architecture="LlamaForCausalLM",
    layers=(LayerSpec("full", 2, 32, 32),) * 4,
    dtype="float32",
    kin=hashlib.sha256(b"chaos").digest(),
    variant=hashlib.sha256(b"chaos, variant").digest(),
)
BLOCK_TOKENS = 64
BLOCKS = 6
TOKENS = BLOCKS * BLOCK_TOKENS
"""A prompt: six blocks of 128 KiB."""


@lru_cache(maxsize=4096)
def prompt(number: int) -> Chain:
    """Prompt `number` of the working set: the same tokens and keys in every process."""
    tokens = np.random.default_rng([7, number]).integers(0, 1 << 15, TOKENS).astype(np.uint32)
    return chain(space_of(SPEC.kin), tokens, BLOCK_TOKENS)


def header_of(asked: Chain, index: int) -> BlockHeader:
    """The header of block `index` of a prompt."""
    return make_header(
        SPEC,
        space=asked.space,
        parent=asked.parent(index),
        tokens=asked.block(index),
        first=index * BLOCK_TOKENS,
        producer="chaos",
    )


def block(asked: Chain, index: int) -> Block:
    """Block `index` of a prompt, its numbers those of its key."""
    header = header_of(asked, index)
    return block_of(header, asked.block(index), numbers(header.key, header))


def block_bytes() -> int:
    """The size in bytes of one raw block."""
    return raw_layout(header_of(prompt(0), 0)).size


def numbers(key: bytes, header: BlockHeader) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """What the arrays of block `key` hold: bits out of a generator that starts from the key."""
    stream = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    found = {}
    for name, shape in array_shapes(header).items():
        bits = stream.integers(0, 1 << 32, shape, np.uint32)
        found[name] = (bits & 0x3FFFFFFF).view(np.float32)  # no number without a value, like 0/0
    return found


def wrong(asked: Chain, loaded: Loaded) -> str | None:
    """What is wrong with what was loaded for a prompt, None where every byte is that of the key asked for."""
    if len(loaded.blocks) > len(asked.keys):
        return f"{len(loaded.blocks)} blocks of {len(asked.keys)}"
    for index, found in enumerate(loaded.blocks):
        used = loaded.lengths[index]
        where = f"block {index} of {asked.keys[-1].hex()[:12]}"
        if not np.array_equal(found.tokens[:used], asked.block(index)[:used]):
            return f"{where}: other tokens"
        for name, array in numbers(asked.keys[index], header_of(asked, index)).items():
            if array[:, :, :used].tobytes() != found.arrays[name][:, :, :used].tobytes():
                return f"{where}: other numbers in {name}"
    return None
