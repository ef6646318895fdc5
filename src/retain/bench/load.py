"""The load rows of bench `store`: `cache.load` from disk beside pread + xxh3 + copy, and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import xxhash

from retain.address import TierAddress
from retain.bench.clock import Contender, Sample, interleaved, timed
from retain.bench.files import forget, read_file, write_file
from retain.bench.report import Value
from retain.block import Block, array_shapes, make_header
from retain.cache import Cache, Loaded, Query, open_cache
from retain.identity import chain, space_of
from retain.model import LayerSpec, ModelSpec

SPEC = ModelSpec(
    name="bench",
    architecture="LlamaForCausalLM",
    layers=(LayerSpec("full", 4, 64, 64),) * 8,
    dtype="float32",
    kin=bytes(32),
    variant=bytes(32),
)
"""A model whose blocks of 256 tokens have 4 MiB."""

PROMPTS = 8
PROMPT_TOKENS = 2048
ARENA_BYTES = 96 << 20
"""Room for two prompts and a bit, so that going round all of them finds none in memory."""

RESTARTS = 5


def load_rows(folder: Path, rounds: int, prompts: int = PROMPTS) -> tuple[list[dict[str, Value]], float]:
    """Rows of loading from disk, and after a restart with the page cache cold and warm; the ratio."""
    tiers = (TierAddress("memory", capacity=ARENA_BYTES), TierAddress("disk", folder / "load"))
    queries = [
        Query(chain(space_of(SPEC.kin), np.random.default_rng(n).integers(0, 1 << 15, PROMPT_TOKENS)), SPEC)
        for n in range(prompts)
    ]
    # Plain LRU: gone round in order, what comes next is always what was evicted last.
    with open_cache(*tiers, policy="lru") as cache:
        for query in queries:
            _keep(cache, query)
        objects = [_objects(folder / "load", query) for query in queries]
        baseline = _Baseline(folder / "bare", objects)
        out = np.ones((PROMPT_TOKENS, SPEC.token_bytes), np.uint8)

        def load(turn: int) -> None:
            query = queries[turn % prompts]
            with cache.load(cache.lookup(query, plan=False)) as loaded:
                _copy_out(loaded, out)
                if loaded.tokens_by_tier != {"disk": PROMPT_TOKENS}:
                    raise AssertionError(
                        f"a prompt was to be loaded from disk, but came from {loaded.tokens_by_tier}"
                    )

        moved = sum(path.stat().st_size for path in objects[0])
        found = interleaved(
            {"retain": Contender(load), "bare": Contender(baseline.read)}, rounds, warmups=prompts
        )
    warm, bare = found["retain"], found["bare"]
    ratio = bare.cpu_seconds / warm.cpu_seconds
    rows: list[dict[str, Value]] = [
        {
            "what": "cache.load from disk",
            "object_bytes": moved // len(objects[0]),
            "bytes_per_cpu_second": moved / warm.cpu_seconds,
            "beside": "pread + xxh3 + copy",
            "baseline_bytes_per_cpu_second": moved / bare.cpu_seconds,
            "ratio": ratio,
            "bytes_per_second": moved / warm.seconds,
        }
    ]
    rows.extend(_restart(tiers, queries, objects, baseline, state, moved) for state in ("cold", "warm"))
    return rows, ratio


def _keep(cache: Cache, query: Query) -> None:
    prompt = query.chain
    random = np.random.default_rng(7)
    for index in range(len(prompt.keys)):
        tokens = prompt.block(index)
        header = make_header(
            SPEC,
            space=prompt.space,
            parent=prompt.parent(index),
            tokens=tokens,
            first=index * prompt.block_tokens,
        )
        arrays = {
            name: random.standard_normal(shape, np.float32) for name, shape in array_shapes(header).items()
        }
        if not cache.store(Block(header, tokens, arrays)).kept:
            raise AssertionError("the bench's cache has room for its blocks")
    if not cache.flush():
        raise AssertionError("the blocks were not written within a minute")


def _objects(folder: Path, query: Query) -> list[Path]:
    """The files of a prompt's blocks, found by what every object's file is named after: its key."""
    files = {path.name.partition(".")[0]: path for path in folder.rglob("*") if path.is_file()}
    return [files[key.hex()] for key in query.chain.keys]


def _copy_out(loaded: Loaded, out: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
    at = 0
    flat = out.reshape(-1)
    for block in loaded.blocks:
        for array in block.arrays.values():
            data = array.reshape(-1).view(np.uint8)
            np.copyto(flat[at : at + data.size], data)
            at += data.size
    if at != flat.size:
        raise AssertionError(f"a prompt of {flat.size} bytes was loaded, got {at}")


class _Baseline:
    """Copies of the prompts' objects, each read by pread into a buffer, hashed and copied out."""

    def __init__(self, folder: Path, objects: Sequence[Sequence[Path]]) -> None:
        folder.mkdir(exist_ok=True)
        self.files: list[list[str]] = []
        for number, paths in enumerate(objects):
            row = []
            for place, path in enumerate(paths):
                copy = str(folder / f"load-{number}-{place}")
                write_file(copy, np.frombuffer(path.read_bytes(), np.uint8))
                row.append(copy)
            self.files.append(row)
        size = objects[0][0].stat().st_size
        self._places = np.ones((ARENA_BYTES // size, size), np.uint8)
        self._out = np.ones((len(objects[0]), size), np.uint8)
        self._next = 0

    def read(self, turn: int) -> None:
        for place, path in enumerate(self.files[turn % len(self.files)]):
            buffer = self._places[self._next % len(self._places)]
            self._next += 1
            read_file(path, memoryview(buffer))
            xxhash.xxh3_64_intdigest(buffer)
            np.copyto(self._out[place], buffer)


def _restart(
    tiers: Sequence[TierAddress],
    queries: Sequence[Query],
    objects: Sequence[Sequence[Path]],
    baseline: _Baseline,
    page_cache: str,
    moved: int,
) -> dict[str, Value]:
    """Open a fresh cache on what was kept and load one prompt; beside reading the same bytes bare."""
    opened: list[Sample] = []
    loaded: list[Sample] = []
    bare: list[Sample] = []
    out = np.ones((PROMPT_TOKENS, SPEC.token_bytes), np.uint8)
    for turn in range(RESTARTS):
        place = turn % len(queries)
        for path in (*objects[place], *map(Path, baseline.files[place])):
            (forget if page_cache == "cold" else Path.read_bytes)(path)
        caches: list[Cache] = []
        opened.append(timed(lambda caches=caches: caches.append(open_cache(*tiers))))  # type: ignore[misc]
        with caches[0] as cache:

            def load(cache: Cache = cache, place: int = place) -> None:
                with cache.load(cache.lookup(queries[place], plan=False)) as found:
                    _copy_out(found, out)

            loaded.append(timed(load))
        bare.append(timed(lambda place=place: baseline.read(place)))  # type: ignore[misc]
    seconds = median(sample.seconds for sample in loaded)
    bare_seconds = median(sample.seconds for sample in bare)
    return {
        "what": f"restart, page cache {page_cache}",
        "object_bytes": moved // len(objects[0]),
        "beside": "pread + xxh3 + copy",
        "ratio": bare_seconds / seconds,
        "bytes_per_second": moved / seconds,
        "open_seconds": median(sample.seconds for sample in opened),
        "load_seconds": seconds,
        "baseline_seconds": bare_seconds,
    }
