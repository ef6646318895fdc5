"""A stack under test: one daemon over its tiers, a crew of clients, and what must come back to rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from retain.address import parse_tier
from retain.bench.chaos.crew import Crew
from retain.bench.chaos.footprint import Footprint, daemons, footprint, leftovers, object_bytes
from retain.bench.chaos.proxy import Proxy
from retain.bench.server import OwnDaemons
from retain.bench.services import Running, with_parent
from retain.daemon.client import RemoteCache
from retain.daemon.start import connect, log_path, reach, socket_path
from retain.errors import RetainError, StoreUnavailable

SETTLE_SECONDS = 30.0
"""How long leases, writes and connections may take to end once nobody asks for anything."""

BACK_SECONDS = 60.0
"""How long a daemon may take to be back, on a machine that is busy with other things."""

MORE_SOCKETS_A_TIER = 16
"""How many connections a remote tier may keep open for later."""

MORE_THREADS = 24
"""Pools of threads grow to their size when they are first needed."""

MORE_BYTES = 48 << 20
"""What allocators may keep for later; a leak in every round is more than that."""


class StackError(RetainError):
    """A stack does not come to its work; the text says why."""


@dataclass
class Medium:
    """What lies under a stack and can be spoiled: servers, the ways to them, folders of disk tiers."""

    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    servers: Mapping[str, Running] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    clock: Path | None = None


class Stack:
    """A daemon for `tiers` with `clients` clients that go over `prompts` prompts; a context.

    `capacities` are the most bytes that the folders of its own disk tiers may ever hold.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        folder: Path,
        medium: Medium,
        *,
        prompts: int,
        clients: int = 3,
        pause: float = 0.01,
        seed: int = 1,
        capacities: Mapping[Path, int] | None = None,
    ) -> None:
        self.tiers = list(tiers)
        self.medium = medium
        self._folder = folder
        self._capacities = dict(capacities or {})
        self._owned = OwnDaemons()
        self._runtime = Path(self._owned.environment["XDG_RUNTIME_DIR"]) / "retain"
        self._crew_made_of = {"size": clients, "prompts": prompts, "pause": pause, "seed": seed}
        self._base: dict[str, Footprint] = {}

    def __enter__(self) -> Self:
        self._owned.__enter__()
        try:
            if self.medium.clock is not None:
                self._start_with_clock(self.medium.clock)
            try:
                self.observer: RemoteCache = connect(self.tiers, client="observer")
            except StoreUnavailable as error:
                raise StackError(str(error)) from error
            self.crew = Crew(self.tiers, self._folder, **self._crew_made_of)  # type: ignore[arg-type]
            self.crew.__enter__()
            try:
                self._warm()
            except BaseException:
                self.crew.__exit__(None, None, None)
                raise
        except BaseException:
            self._end_daemons()
            self._owned.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.crew.__exit__(kind, error, trace)
        self.observer.close()
        self._end_daemons()
        self._owned.__exit__(kind, error, trace)

    # the daemon

    @property
    def daemon(self) -> int | None:
        """The process id of the daemon that serves now."""
        found = daemons(self._runtime)
        return found[0] if found else None

    def kill_daemon(self, *, young: bool = False) -> None:
        """Kill the daemon (SIGKILL), and wait until there is another that answers; or, if `young`, that is
        merely on its way. Raises StackError.
        """
        old = daemons(self._runtime)
        for pid in old:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until_back(set(old), young=young)

    def wait_until_back(self, gone: set[int], *, young: bool = False) -> None:
        """Wait until a daemon that is none of `gone` answers, or is there at all if `young`. Raises
        StackError.
        """
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            state = self.observer.state()  # has it reconnected, and so the daemon started
            if state is not None and state.pid not in gone:
                return
            if young and any(pid not in gone for pid in daemons(self._runtime)):
                return
            if time.monotonic() > deadline:
                path = log_path(socket_path([parse_tier(each) for each in self.tiers], "reuse-leaf"))
                words = path.read_text("utf-8", "replace")[-500:] if path.exists() else ""
                raise StackError(f"no daemon is back after {BACK_SECONDS:.0f} s: {words}")
            time.sleep(0.005)

    # coming to rest

    def settle(self, seconds: float = SETTLE_SECONDS) -> list[str]:
        """Have everyone rest; what is held or grown after at most `seconds`, which should be nothing."""
        self.crew.rest()
        deadline = time.monotonic() + seconds
        while (found := self._held()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def back_to_work(self, seconds: float = 30.0) -> bool:
        """Whether loads give blocks again within `seconds`, and every server is in use again, once nothing is
        broken any more.
        """
        self.crew.go()
        deadline = time.monotonic() + seconds
        before = self.crew.blocks
        while self.crew.blocks == before or not self._all_up():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
            self.crew.listen()
        return True

    def failures(self) -> tuple[int | None, int]:
        """The daemon that answers, and how many failures it has counted since it began."""
        state = self.observer.state()
        return (None, 0) if state is None else (state.pid, sum(state.failures.values()))

    def _all_up(self) -> bool:
        state = self.observer.state()
        return state is not None and all(health.startswith("up") for health in state.health.values())

    def _warm(self) -> None:
        self.crew.go()
        time.sleep(1.0)
        if not self.back_to_work(60.0):
            raise StackError(f"nothing is ever loaded: {self.observer.stats()}")
        held = self.settle()
        if held:
            raise StackError(f"the stack did not come to rest before anything was broken: {'; '.join(held)}")
        self.crew.seen()
        self._base = self._footprints()

    def _held(self) -> list[str]:
        state = self.observer.state()
        if state is None:
            return ["the daemon does not answer"]
        found = []
        leased = sum(tier[5] for tier in state.tiers)
        if leased:
            found.append(f"{leased} leases")
        if state.pending:
            found.append(f"{state.pending} writes")
        if state.temporary:
            found.append(f"{state.temporary} temporary bytes")
        if state.sessions != 1 + self.crew.size:
            found.append(f"{state.sessions} sessions of {1 + self.crew.size} clients")
        alive = daemons(self._runtime)
        if len(alive) != 1:
            found.append(f"{len(alive)} daemons")
        for folder, capacity in self._capacities.items():
            found += leftovers(folder, 1)
            if (held := object_bytes(folder)) > capacity:
                found.append(f"{held} bytes in {folder.name}, which may hold {capacity}")
        return found + self._grown()

    def _grown(self) -> list[str]:
        found = []
        spare = MORE_SOCKETS_A_TIER * len(self.medium.proxies) + 2 * (1 + self.crew.size)
        for name, now in self._footprints().items():
            base = self._base.get(name)
            if now.zombies:
                found.append(f"{name}: {now.zombies} children that nobody buried")
            if base is None:
                continue
            for what, was, grown, more in (
                ("files", base.files, now.files, 0),
                ("sockets", base.sockets, now.sockets, spare if name == "daemon" else 2),
                ("other descriptors", base.others, now.others, 0),
                ("threads", base.threads, now.threads, MORE_THREADS if name == "daemon" else 2),
                ("bytes", base.own_bytes, now.own_bytes, MORE_BYTES),
            ):
                if grown > was + more:
                    found.append(f"{name}: {grown} {what}, {was} before")
        return found

    def _footprints(self) -> dict[str, Footprint]:
        """Of the daemon and of the largest of the clients, which are all alike."""
        found = {}
        pid = self.daemon
        daemon = None if pid is None else footprint(pid)
        if daemon is not None:
            found["daemon"] = daemon
        clients = [each for each in map(footprint, self.crew.pids) if each is not None]
        if clients:
            found["client"] = Footprint(
                *(max(getattr(each, name) for each in clients) for name in Footprint.__dataclass_fields__)
            )
        own = footprint(os.getpid())
        if own is not None and own.zombies:
            found["bench"] = own
        return found

    def _start_with_clock(self, clock: Path) -> None:
        """Start the daemon under a wall clock that `clock` sets; nobody starts another while it lives."""
        addresses = [parse_tier(each) for each in self.tiers]
        self._runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = socket_path(addresses, "reuse-leaf")
        command = [sys.executable, "-m", "retain.bench.chaos.clock", str(clock), "retain.daemon"]
        command += ["--socket", str(path), *(f"--tier={each}" for each in addresses)]
        with log_path(path).open("ab") as log:
            self._clocked = subprocess.Popen(
                with_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            with suppress(OSError):
                reach(path).close()
                return
            if self._clocked.poll() is not None or time.monotonic() > deadline:
                raise StackError(f"no daemon with a clock of its own: {log_path(path).read_text()[-500:]}")
            time.sleep(0.05)

    def _end_daemons(self) -> None:
        for pid in daemons(self._runtime):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while daemons(self._runtime) and time.monotonic() < deadline:
            time.sleep(0.02)
        clocked = getattr(self, "_clocked", None)
        if clocked is not None:
            clocked.wait()
