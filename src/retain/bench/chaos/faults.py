"""The faults: what is broken under a stack that works, and how often."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from retain.bench.chaos.beds import make_file_system, mounted, unmount
from retain.bench.chaos.clock import set_clock
from retain.bench.chaos.damage import KINDS, Spoil, damage
from retain.bench.chaos.stack import Stack

DAY, YEAR = 86400.0, 365 * 86400.0
JUMPS = (0.0, 1.0, -1.0, DAY, -DAY, 10 * YEAR, -10 * YEAR, 80 * YEAR)
"""By how many seconds a clock is wrong."""


@dataclass(frozen=True)
class Scale:
    """How much of everything: how often the daemon and clients are killed and the daemon is started anew,
    rounds of everything else, seconds that a server hangs, and seconds of each other fault.
    """

    kills: int
    client_kills: int
    restarts: int
    rounds: int
    hang: float
    period: float


FULL = Scale(kills=100, client_kills=100, restarts=50, rounds=5, hang=30.0, period=3.0)
QUICK = Scale(kills=2, client_kills=10, restarts=3, rounds=1, hang=2.0, period=1.0)


@dataclass(frozen=True)
class Round:
    """What a fault is given: the stack, which works, dice, and the scale."""

    stack: Stack
    dice: random.Random
    scale: Scale


@dataclass(frozen=True)
class Fault:
    """One way to break a bed. `inflict` does it once and ends it; `rounds` is how often at a scale."""

    bed: str
    name: str
    rounds: Callable[[Scale], int]
    inflict: Callable[[Round], None]

    @property
    def title(self) -> str:
        return f"{self.bed}: {self.name}"


def all_faults() -> list[Fault]:
    """Every fault, those of a bed together."""
    found: list[Fault] = [
        *_processes("memory"),
        *_processes("disk"),
        *_damages("disk"),
        Fault("eviction", "a working set of 10 times the cache", _rounds, _just_work),
        Fault("full", "no room on the medium (ENOSPC)", _rounds, _just_work),
        Fault("full", "no inodes left", _rounds, _no_inodes),
        Fault("readonly", "a medium that turns read-only", _rounds, _turn_read_only),
        *_remote("redis"),
        *_processes("redis"),
        *_remote("http"),
        *_statuses("http"),
        *_processes("http"),
        *_remote("object"),
        *_statuses("object"),
        *_processes("object"),
        Fault("clock", "a wall clock that jumps", _rounds, _jump),
        *_processes("stack"),
        Fault("stack", "restarts of the daemon within 50 ms", lambda scale: scale.restarts, _restart),
        Fault("stack", "a daemon that hangs", _rounds, _hang_daemon),
        Fault("stack", "everything at once", _rounds, _everything),
    ]
    return found


def _rounds(scale: Scale) -> int:
    return scale.rounds


# processes


def _processes(bed: str) -> Iterator[Fault]:
    yield Fault(bed, "kill -9 of the daemon", lambda scale: scale.kills, _kill_daemon)
    yield Fault(bed, "kill -9 of a client", lambda scale: scale.client_kills, _kill_client)


def _kill_daemon(given: Round) -> None:
    time.sleep(given.dice.uniform(0.0, 0.4))
    if given.dice.random() < 0.2:  # and the next one while it starts
        given.stack.kill_daemon(young=True)
        time.sleep(given.dice.uniform(0.0, 1.0))
    given.stack.kill_daemon()


def _kill_client(given: Round) -> None:
    time.sleep(given.dice.uniform(0.0, 0.2))
    crew = given.stack.crew
    crew.kill(given.dice.randrange(crew.size))


def _restart(given: Round) -> None:
    given.stack.kill_daemon()
    time.sleep(given.dice.uniform(0.0, 0.05))


def _hang_daemon(given: Round) -> None:
    pid = given.stack.daemon
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(max(4.0, given.scale.hang / 4))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    given.stack.wait_until_back(set())


# the way to a server, and the server


def _remote(tier: str) -> Iterator[Fault]:
    yield Fault(tier, "connection resets", _rounds, partial(_resets, tier=tier))
    yield Fault(tier, "half responses", _rounds, partial(_halves, tier=tier))
    yield Fault(tier, "connections refused", _rounds, partial(_way, tier=tier, refuse=True))
    yield Fault(tier, "connections without an answer", _rounds, partial(_way, tier=tier, silent=True))
    yield Fault(tier, "200 ms delay", _rounds, partial(_way, tier=tier, delay=0.2))
    yield Fault(tier, "1 MB/s", _rounds, partial(_way, tier=tier, rate=1e6))
    yield Fault(tier, "SIGSTOP of the server", lambda _: 1, partial(_hang_server, tier=tier))
    yield from _damages(tier)


def _statuses(tier: str) -> Iterator[Fault]:
    for status in (500, 403, 404):
        yield Fault(tier, f"status {status}", _rounds, partial(_way, tier=tier, status=status))


def _resets(given: Round, tier: str) -> None:
    proxy = given.stack.medium.proxies[tier]
    ends = time.monotonic() + given.scale.period
    while time.monotonic() < ends:
        proxy.reset()
        time.sleep(given.dice.uniform(0.0, 0.06))


def _halves(given: Round, tier: str) -> None:
    proxy = given.stack.medium.proxies[tier]
    ends = time.monotonic() + given.scale.period
    while time.monotonic() < ends:
        proxy.half = given.dice.choice((1, 7, 100, 1_000, 20_000, 100_000, 300_000))
        proxy.reset()
        time.sleep(0.1)
    proxy.clear()


def _way(given: Round, tier: str, **how: object) -> None:
    proxy = given.stack.medium.proxies[tier]
    for name, value in how.items():
        setattr(proxy, name, value)
    if "delay" not in how and "rate" not in how:
        proxy.reset()
    time.sleep(given.scale.period)
    proxy.clear()
    proxy.reset()


def _hang_server(given: Round, tier: str) -> None:
    server = given.stack.medium.servers[tier]
    server.stop()
    try:
        time.sleep(given.scale.hang)
    finally:
        server.go_on()


# objects and media


def _damages(tier: str) -> Iterator[Fault]:
    for name, spoil in KINDS.items():
        yield Fault(tier, name, _rounds, partial(_damage, tier=tier, spoil=spoil))


def _damage(given: Round, tier: str, spoil: Spoil) -> None:
    ends = time.monotonic() + given.scale.period
    while time.monotonic() < ends:
        damage(tier, given.stack.medium, spoil, given.dice, 8)
        time.sleep(0.1)


def _just_work(given: Round) -> None:
    time.sleep(2 * given.scale.period)


def _no_inodes(given: Round) -> None:
    place = given.stack.medium.folders["mount"]
    state = os.statvfs(place)
    remount(place, f"nr_inodes={state.f_files - state.f_ffree + 1}")
    time.sleep(given.scale.period)
    remount(place, f"nr_inodes={state.f_files}")


def _turn_read_only(given: Round) -> None:
    """As a kernel does on an error. What lies there stays readable; then there is a new medium in its place,
    for a new daemon: the file system that failed lives as long as somebody has files of it open.
    """
    folders = given.stack.medium.folders
    place = folders["mount"]
    remount(place, "abort")
    time.sleep(given.scale.period)
    unmount(place)
    image = folders["image"].with_name(f"image-{given.dice.getrandbits(32):x}")
    make_file_system(image)
    with ExitStack() as kept:
        mounted(kept, place, str(image), "loop", "ext4")
        kept.pop_all()  # the bed unmounts it
    given.stack.kill_daemon()


def _jump(given: Round) -> None:
    medium = given.stack.medium
    if medium.clock is None:
        raise ValueError("this stack has no clock of its own")
    ends = time.monotonic() + 2 * given.scale.period
    while time.monotonic() < ends:
        wrong_by = given.dice.choice(JUMPS)
        set_clock(medium.clock, wrong_by)
        objects = [*medium.folders["disk"].glob("??/*")]
        for path in given.dice.sample(objects, min(4, len(objects))):
            with suppress(OSError):
                os.utime(path, (max(0.0, time.time() + wrong_by),) * 2)
        time.sleep(0.05)
    set_clock(medium.clock, 0.0)


def _everything(given: Round) -> None:
    stack, dice = given.stack, given.dice
    ends = time.monotonic() + 3 * given.scale.period
    while time.monotonic() < ends:
        for tier, proxy in stack.medium.proxies.items():
            proxy.clear()
            match dice.randrange(7):
                case 0:
                    proxy.reset()
                case 1:
                    proxy.half = dice.randrange(200_000)
                case 2:
                    proxy.delay = 0.2
                case 3:
                    proxy.rate = 1e6
                case 4:
                    proxy.refuse = True
                    proxy.reset()
                case 5:
                    damage(tier, stack.medium, dice.choice([*KINDS.values()]), dice, 4)
        if dice.random() < 0.3:
            damage("disk", stack.medium, dice.choice([*KINDS.values()]), dice, 4)
        if dice.random() < 0.3:
            _kill_client(given)
        if dice.random() < 0.1:
            stack.kill_daemon()
        time.sleep(0.1)
    for proxy in stack.medium.proxies.values():
        proxy.clear()
        proxy.reset()


def remount(place: object, options: str) -> None:
    """Change the options of a mounted file system. Raises OSError."""
    done = subprocess.run(
        ["mount", "-o", f"remount,{options}", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"{place} cannot be remounted with {options}: {done.stderr.strip()}")
