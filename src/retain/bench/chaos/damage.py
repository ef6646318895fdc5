"""Damage to objects behind a store's back: bits flipped, objects cut short or put in others' places."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retain.bench.chaos.beds import BUCKET
from retain.bench.chaos.stack import Medium

Spoil = Callable[[random.Random, bytes, bytes], bytes]
"""Makes of an object's bytes, and another object's, what shall lie there from now on."""


def flipped(dice: random.Random, data: bytes, other: bytes) -> bytes:
    """One bit is another."""
    spoiled = bytearray(data)
    if spoiled:
        spoiled[dice.randrange(len(spoiled))] ^= 1 << dice.randrange(8)
    return bytes(spoiled)


def truncated(dice: random.Random, data: bytes, other: bytes) -> bytes:
    """The end is missing, or everything."""
    return data[: dice.choice((0, 1, 8, 200, dice.randrange(len(data) + 1), max(0, len(data) - 1)))]


def swapped(dice: random.Random, data: bytes, other: bytes) -> bytes:
    """Another whole object lies there."""
    return other


KINDS: Mapping[str, Spoil] = {"bit flips": flipped, "truncation": truncated, "swapped objects": swapped}


def damage(tier: str, medium: Medium, spoil: Spoil, dice: random.Random, most: int) -> int:
    """Spoil up to `most` objects of a tier; how many it were."""
    if tier in medium.folders:
        return _in_folder(medium.folders[tier], spoil, dice, most)
    port = medium.servers[tier].port
    return _in_redis(port, spoil, dice, most) if tier == "redis" else _in_bucket(port, spoil, dice, most)


def _in_folder(folder: Path, spoil: Spoil, dice: random.Random, most: int) -> int:
    files = [path for path in folder.glob("??/*") if path.is_file()]
    done = 0
    for path in dice.sample(files, min(most, len(files))):
        with suppress(FileNotFoundError):  # evicted meanwhile
            spoiled = spoil(dice, path.read_bytes(), dice.choice(files).read_bytes())
            if dice.random() < 0.5:  # in place, while readers read
                file = os.open(path, os.O_WRONLY | os.O_TRUNC)
                os.write(file, spoiled)
                os.close(file)
            else:
                fresh = folder / f"spoiled-{path.name}"
                fresh.write_bytes(spoiled)
                fresh.rename(path)
            done += 1
    return done


def _in_redis(port: int, spoil: Spoil, dice: random.Random, most: int) -> int:
    import redis

    client: Any = redis.Redis(port=port)
    try:
        names = list(client.scan_iter(count=1000))
        done = 0
        for name in dice.sample(names, min(most, len(names))):
            data, other = client.get(name), client.get(dice.choice(names))
            if data is not None and other is not None:
                client.set(name, spoil(dice, data, other))
                done += 1
        return done
    finally:
        client.close()


def _in_bucket(port: int, spoil: Spoil, dice: random.Random, most: int) -> int:
    import obstore
    from obstore.store import S3Store

    store: Any = S3Store(BUCKET, endpoint=f"http://127.0.0.1:{port}", client_options={"allow_http": True})
    names = [str(each["path"]) for page in obstore.list(store) for each in page]
    done = 0
    for name in dice.sample(names, min(most, len(names))):
        with suppress(FileNotFoundError):
            data = bytes(obstore.get(store, name).bytes())
            other = bytes(obstore.get(store, dice.choice(names)).bytes())
            obstore.put(store, name, spoil(dice, data, other))
            done += 1
    return done
