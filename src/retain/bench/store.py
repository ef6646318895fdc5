"""Bench `store`: each tier beside the bare calls and clients it rests on, per second of CPU time.

Everything is cold for the processor's caches: each pass goes over more bytes than they hold. The tier and the
bare call take turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retain.bench.clock import Contender, Sample, interleaved
from retain.bench.files import read_file, write_file
from retain.bench.lmcache import file_rates
from retain.bench.load import PROMPTS, load_rows
from retain.bench.pool import Pool
from retain.bench.progress import Steps
from retain.bench.remote import REMOTE
from retain.bench.report import Report, Value, new_figure
from retain.errors import ConfigError
from retain.stores.base import Store
from retain.stores.disk import DiskStore
from retain.stores.memory import MemoryStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (64 << 10, 1 << 20, 4 << 20, 32 << 20)
RATIO_SIZE = 4 << 20
"""The size whose rows give the ratios: about a block of a small model."""

POOL_BYTES = 256 << 20
"""Bytes gone over in turn: several times the last-level cache of the machine this was written on (32 MiB)."""

ROUNDS = 24
LOCAL = ("memory", "disk")
REMOTE_SIZES = (1 << 20, 4 << 20)
REMOTE_POOL_BYTES = 64 << 20
REMOTE_ROUNDS = 6


def run(
    sizes: Sequence[int] = SIZES,
    pool_bytes: int = POOL_BYTES,
    rounds: int = ROUNDS,
    ratio_size: int = RATIO_SIZE,
    prompts: int = PROMPTS,
    tiers: Sequence[str] = LOCAL,
    peers: str | None = None,
) -> Report:
    """Measure in a temporary folder. `ratio_size` is one of `sizes`; loading goes over `prompts` prompts.
    `peers` is the Python of a venv with LMCache, whose files are then measured too.

    Raises ConfigError for a tier that is not known, MissingDependency where its server is not installed.
    """
    for tier in tiers:
        if tier not in (*LOCAL, *REMOTE):
            raise ConfigError(
                f"there is no bench of a tier {tier!r}; known are {', '.join((*LOCAL, *REMOTE))}"
            )
    rows: list[dict[str, Value]] = []
    ratios: dict[str, float] = {}
    with (
        Steps("store", _steps(sizes, tiers)) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
    ):
        for size in sizes:
            pool = Pool(size, pool_bytes)
            for tier, measure in (("memory", _memory), ("disk", _disk)):
                if tier not in tiers:
                    continue
                for verb, label, found, baseline in measure(pool, Path(folder), rounds):
                    steps.step(f"{tier} {verb}, {size >> 10} KiB")
                    row = _row(f"{tier} {verb}", label, size, pool.batch * size, found, baseline)
                    rows.append(row)
                    if size == ratio_size:
                        ratios[f"store.{tier}.{verb}"] = float(row["ratio"] or 0)
            if "disk" in tiers and peers is not None:
                for row in _beside_lmcache(rows, file_rates(peers, Path(folder), size), size):
                    rows.append(row)
                    if size == ratio_size:
                        verb = str(row["what"]).split()[1]
                        ratios[f"store.disk.{verb}_over_lmcache"] = float(row["ratio"] or 0)
        for tier in (each for each in REMOTE if each in tiers):
            for size in (each for each in sizes if each in REMOTE_SIZES):
                pool = Pool(size, min(pool_bytes, REMOTE_POOL_BYTES))
                for verb, label, found, baseline in REMOTE[tier](
                    pool, Path(folder), min(rounds, REMOTE_ROUNDS)
                ):
                    row = _row(f"{tier} {verb}", label, size, pool.batch * size, found, baseline)
                    rows.append(row)
                    if size == ratio_size and label != "raw socket":
                        # The first client is the fastest where there are several.
                        ratios.setdefault(f"store.{tier}.{verb}", float(row["ratio"] or 0))
                steps.step(f"{tier}, {size >> 10} KiB")
        if "store.redis.get" in ratios:
            ratios["store.redis.get_over_redis_py"] = ratios["store.redis.get"]
        if "disk" in tiers:
            steps.step("cache.load from disk", 0)
            loading, ratio = load_rows(Path(folder), rounds, prompts)
            steps.step("restart", 2)
            rows += loading
            ratios["store.cache.load"] = ratio
    return Report("store", rows, ratios, {"contents_equal": True})


def _steps(sizes: Sequence[int], tiers: Sequence[str]) -> int:
    local = sum(2 * len(sizes) for tier in LOCAL if tier in tiers)
    remote = sum(len(set(sizes) & set(REMOTE_SIZES)) for tier in REMOTE if tier in tiers)
    return local + remote + (2 if "disk" in tiers else 0)


_Measured = Iterator[tuple[str, str, Sample, Sample]]


def _memory(pool: Pool, folder: Path, rounds: int) -> _Measured:
    with _closing(MemoryStore(pool.count * pool.size * 2)) as store:
        names = pool.names("o")

        def put(turn: int) -> None:
            for number in pool.turns(turn):
                store.write(names[number], [pool.source[number].data])

        def copy_in(turn: int) -> None:
            for number in pool.turns(turn):
                np.copyto(pool.target[number], pool.source[number])

        def get(turn: int) -> None:
            out = pool.out.data
            for number in pool.turns(turn):
                store.read_into(names[number], out)

        def copy_out(turn: int) -> None:
            for number in pool.turns(turn):
                np.copyto(pool.out, pool.target[number])

        for turn in range(
            pool.count // pool.batch
        ):  # once over the arena, as over `target`: no page is fresh
            put(turn)
        found = interleaved(
            {"retain": Contender(put, _deleting(store, pool, names)), "bare": Contender(copy_in)}, rounds
        )
        _check(store, names, pool)
        yield "put", "memcpy", found["retain"], found["bare"]
        found = interleaved({"retain": Contender(get), "bare": Contender(copy_out)}, rounds)
        yield "get", "memcpy", found["retain"], found["bare"]


def _disk(pool: Pool, folder: Path, rounds: int) -> _Measured:
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    with _closing(DiskStore(folder / "store")) as store:
        names = pool.names("o")
        paths = [str(bare / name) for name in names]

        def put(turn: int) -> None:
            for number in pool.turns(turn):
                store.write(names[number], [pool.source[number].data])

        def pwrite(turn: int) -> None:
            for number in pool.turns(turn):
                write_file(paths[number], pool.source[number])

        def get(turn: int) -> None:
            out = pool.out.data
            for number in pool.turns(turn):
                store.read_into(names[number], out)

        def pread(turn: int) -> None:
            out = pool.out.data
            for number in pool.turns(turn):
                read_file(paths[number], out)

        def unlink(turn: int) -> None:
            for number in pool.turns(turn):
                Path(paths[number]).unlink(missing_ok=True)

        found = interleaved(
            {"retain": Contender(put, _deleting(store, pool, names)), "bare": Contender(pwrite, unlink)},
            rounds,
        )
        for turn in range(pool.count // pool.batch):  # where there were fewer rounds than batches
            unlink(turn)
            pwrite(turn)
            put(turn)
        _check(store, names, pool)
        yield "put", "pwrite", found["retain"], found["bare"]
        found = interleaved({"retain": Contender(get), "bare": Contender(pread)}, rounds)
        yield "get", "pread", found["retain"], found["bare"]
        for number in range(pool.count):
            store.delete(names[number])
            Path(paths[number]).unlink()


def _deleting(store: Store, pool: Pool, names: list[str]) -> Callable[[int], None]:
    def delete(turn: int) -> None:
        for number in pool.turns(turn):
            store.delete(names[number])

    return delete


def _check(store: Store, names: list[str], pool: Pool) -> None:
    """What was measured must have happened."""
    for number in (0, pool.count - 1):
        pool.out[:] = 0
        if store.read_into(names[number], pool.out.data) != pool.size:
            raise AssertionError(f"the {store.kind} store gave back {names[number]} with another size")
        if not np.array_equal(pool.out, pool.source[number]):
            raise AssertionError(f"the {store.kind} store gave back {names[number]} with other bytes")


@contextmanager
def _closing(store: Store) -> Iterator[Store]:
    try:
        yield store
    finally:
        store.close()


def _row(what: str, label: str, size: int, moved: int, found: Sample, baseline: Sample) -> dict[str, Value]:
    return {
        "what": what,
        "object_bytes": size,
        "bytes_per_cpu_second": moved / found.cpu_seconds,
        "beside": label,
        "baseline_bytes_per_cpu_second": moved / baseline.cpu_seconds,
        "ratio": baseline.cpu_seconds / found.cpu_seconds,
        "bytes_per_second": moved / found.seconds,
    }


def _beside_lmcache(
    rows: Sequence[dict[str, Value]], rates: Mapping[str, float], size: int
) -> list[dict[str, Value]]:
    """The disk tier's rows of a size again, beside LMCache's adapter for files: by wall time, for that is all
    it tells.
    """
    found: list[dict[str, Value]] = []
    for verb, rate in rates.items():
        mine = next(r for r in rows if r["what"] == f"disk {verb}" and r["object_bytes"] == size)
        speed = float(mine["bytes_per_second"] or 0)
        found.append(
            {
                "what": f"disk {verb}",
                "object_bytes": size,
                "beside": "LMCache's files, wall time",
                "baseline_bytes_per_second": rate,
                "bytes_per_second": speed,
                "ratio": speed / rate,
            }
        )
    return found


def plot(report: Report) -> Figure:
    """The share of the bare call's speed that each tier reaches, by object size."""
    figure, axes = new_figure()
    rows = [row for row in report.rows if row.get("object_bytes") in SIZES and "bytes_per_cpu_second" in row]
    for what in dict.fromkeys(str(row["what"]) for row in rows):
        chosen = [row for row in rows if row["what"] == what]
        labels = [f"{int(row['object_bytes'] or 0) >> 10:,} KiB" for row in chosen]
        axes.plot(
            labels,
            [float(row["ratio"] or 0) for row in chosen],
            marker="o",
            label=f"{what} / {chosen[0]['beside']}",
        )
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("object size")
    axes.set_ylabel("bytes a CPU-second, bare call = 1")
    axes.set_title("Stores beside the bare calls they rest on", loc="left")
    axes.legend(frameon=False)
    return figure
