"""Beds: the stacks that faults are tried on, each with its servers, the ways to them, and the media below."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from retain.bench.chaos.clock import set_clock
from retain.bench.chaos.content import BLOCKS, block_bytes
from retain.bench.chaos.proxy import Proxy
from retain.bench.chaos.stack import Medium, Stack
from retain.bench.services import Running, free_port, make_bucket, redis_server, running, s3_server
from retain.errors import MissingDependency

MEMORY_BYTES = 4 << 20
DISK_BYTES = 12 << 20
ORIGIN_BYTES = 8 << 20
WAIT = "300ms"
"""How long a remote tier is waited for: what breaks here shall reach Retain before its breakers open, on a
machine that is busy."""

TOKEN_NAME = "RETAIN_CHAOS_TOKEN"  # noqa: S105 - the name of a variable
BUCKET = "chaos"

Make = Callable[[ExitStack, Path], tuple[list[str], Medium, Mapping[Path, int]]]


@dataclass(frozen=True)
class Bed:
    """A stack to be made: its tiers with what is below them, and how many times what its own tiers hold its
    clients go over.
    """

    name: str
    make: Make
    times: float
    cache_bytes: int

    @property
    def prompts(self) -> int:
        return max(8, int(self.times * self.cache_bytes / (BLOCKS * block_bytes())))

    @contextmanager
    def opened(self, folder: Path, seed: int) -> Iterator[Stack]:
        """The stack, working. Raises MissingDependency where something that it needs is not here."""
        folder.mkdir()
        with ExitStack() as opened:
            opened.enter_context(_environment())
            tiers, medium, capacities = self.make(opened, folder)
            yield opened.enter_context(
                Stack(tiers, folder, medium, prompts=self.prompts, seed=seed, capacities=capacities)
            )


def _memory(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    return [f"memory:{MEMORY_BYTES}"], Medium(), {}


def _disk(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    kept = folder / "kept"
    return (
        [f"memory:{MEMORY_BYTES}", f"disk:{kept}?capacity={DISK_BYTES}"],
        Medium(folders={"disk": kept}),
        {kept: DISK_BYTES},
    )


def _redis(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    tier, proxy, server = _redis_tier(opened, folder)
    return [f"memory:{MEMORY_BYTES}", tier], Medium({"redis": proxy}, {"redis": server}), {}


def _http(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    tier, proxy, server = _http_tier(opened, folder)
    medium = Medium({"http": proxy}, {"http": server}, {"http": folder / "origin"})
    return [f"memory:{MEMORY_BYTES}", tier], medium, {}


def _object(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    if importlib.util.find_spec("obstore") is None:
        raise MissingDependency("object tiers need obstore: pip install 'retain[object]'")
    server = opened.enter_context(s3_server(folder))
    make_bucket(server.port, BUCKET)
    proxy = opened.enter_context(Proxy(server.port))
    tier = f"s3://{BUCKET}/kv?endpoint=http://127.0.0.1:{proxy.port}&wait=1s"
    return [f"memory:{MEMORY_BYTES}", tier], Medium({"object": proxy}, {"object": server}), {}


def _all(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    """Memory, disk, redis and an origin, under a daemon that anyone may start anew."""
    kept = folder / "kept"
    redis, redis_way, redis_process = _redis_tier(opened, folder)
    http, http_way, http_process = _http_tier(opened, folder)
    medium = Medium(
        {"redis": redis_way, "http": http_way},
        {"redis": redis_process, "http": http_process},
        {"disk": kept, "http": folder / "origin"},
    )
    return (
        [f"memory:{MEMORY_BYTES}", f"disk:{kept}?capacity={DISK_BYTES}", redis, http],
        medium,
        {kept: DISK_BYTES},
    )


def _clocked(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    """Memory, disk and redis, under a daemon that sees another time than the machine does."""
    kept, clock = folder / "kept", folder / "clock"
    set_clock(clock, 0.0)
    redis, way, process = _redis_tier(opened, folder)
    medium = Medium({"redis": way}, {"redis": process}, {"disk": kept}, clock)
    return [f"memory:{MEMORY_BYTES}", f"disk:{kept}?capacity={DISK_BYTES}", redis], medium, {kept: DISK_BYTES}


def _small_medium(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    """A disk tier that believes in more room than its file system has."""
    place = mounted(opened, folder / "small", "tmpfs", "size=8m", "tmpfs")
    kept = place / "kept"
    return (
        [f"memory:{MEMORY_BYTES}", f"disk:{kept}?capacity=64MiB"],
        Medium(folders={"disk": kept, "mount": place}),
        {kept: 8 << 20},
    )


def _failing_medium(opened: ExitStack, folder: Path) -> tuple[list[str], Medium, Mapping[Path, int]]:
    """A disk tier on a file system of its own, which the kernel can be told to turn read-only."""
    image, place = folder / "image", folder / "failing"
    make_file_system(image)
    mounted(opened, place, str(image), "loop", "ext4")
    kept = place / "kept"
    return (
        [f"memory:{MEMORY_BYTES}", f"disk:{kept}?capacity=8MiB"],
        Medium(folders={"disk": kept, "mount": place, "image": image}),
        {kept: 8 << 20},
    )


BEDS: Mapping[str, Bed] = {
    bed.name: bed
    for bed in (
        Bed("memory", _memory, 2, MEMORY_BYTES),
        Bed("disk", _disk, 2, MEMORY_BYTES + DISK_BYTES),
        Bed("redis", _redis, 3, MEMORY_BYTES),
        Bed("http", _http, 3, MEMORY_BYTES),
        Bed("object", _object, 6, MEMORY_BYTES),
        Bed("eviction", _disk, 10, MEMORY_BYTES + DISK_BYTES),
        Bed("full", _small_medium, 3, MEMORY_BYTES + (8 << 20)),
        Bed("readonly", _failing_medium, 2, MEMORY_BYTES + (8 << 20)),
        Bed("clock", _clocked, 2, MEMORY_BYTES + DISK_BYTES),
        Bed("stack", _all, 2, MEMORY_BYTES + DISK_BYTES),
    )
}


def mounted(opened: ExitStack, place: Path, device: str, options: str, kind: str) -> Path:
    """A file system, until `opened` closes. Raises MissingDependency where this process may not mount."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, device, str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MissingDependency(f"a file system of its own needs mount: {error}") from error
    if done.returncode:
        raise MissingDependency(f"a file system of its own needs root, and {kind}: {done.stderr.strip()}")
    opened.callback(unmount, place)
    return place


def unmount(place: Path) -> None:
    """Take a file system away, whoever still has files of it open."""
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def make_file_system(image: Path) -> None:
    """An ext4 of 16 MiB in a file. Raises MissingDependency."""
    with image.open("wb") as file:
        file.truncate(16 << 20)
    command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)]
    try:
        subprocess.run(
            command,
            capture_output=True,
            check=True,
            env=os.environ | {"PATH": f"{os.environ['PATH']}:/sbin:/usr/sbin"},
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingDependency(f"a file system of its own needs mkfs.ext4: {error}") from error


def _redis_tier(opened: ExitStack, folder: Path) -> tuple[str, Proxy, Running]:
    if importlib.util.find_spec("redis") is None:
        raise MissingDependency("redis tiers need redis-py: pip install 'retain[redis]'")
    limits = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    server = opened.enter_context(redis_server(folder / "redis", *limits))
    proxy = opened.enter_context(Proxy(server.port))
    return f"redis://127.0.0.1:{proxy.port}?wait={WAIT}", proxy, server


def _http_tier(opened: ExitStack, folder: Path) -> tuple[str, Proxy, Running]:
    """An origin: a daemon of another configuration, with next to no memory, so that it serves files."""
    port = free_port()
    command = [sys.executable, "-m", "retain.daemon", "--socket", str(folder / "o.sock")]
    command += ["--tier=memory:1MiB", f"--tier=disk:{folder / 'origin'}?capacity={ORIGIN_BYTES}"]
    command += ["--http", str(port), "--http-token", f"env:{TOKEN_NAME}"]
    server = opened.enter_context(running(command, port, folder / "origin.log"))
    proxy = opened.enter_context(Proxy(port))
    return f"http://127.0.0.1:{proxy.port}/kv?write=yes&token=env:{TOKEN_NAME}&wait={WAIT}", proxy, server


@contextmanager
def _environment() -> Iterator[None]:
    """What the daemon needs to reach the servers: credentials that mean nothing."""
    values = {
        TOKEN_NAME: "chaos",
        "AWS_ACCESS_KEY_ID": "chaos",
        "AWS_SECRET_ACCESS_KEY": "chaos",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            with suppress(TypeError):
                os.environ[name] = value  # type: ignore[assignment]
