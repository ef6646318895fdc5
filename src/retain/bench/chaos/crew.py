"""The crew: client processes that store and load until told to rest, killed and replaced at will."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from retain.bench.chaos.client import DEADLINES, END, GO, REST
from retain.bench.services import with_parent
from retain.errors import RetainError

SILENT_SECONDS = 60.0
"""After how long without a word a client counts as hanging."""


class CrewError(RetainError):
    """The clients do not do what they are told; the text says which."""


@dataclass
class Seen:
    """What clients saw: counts, the longest wait of each kind of call in seconds, and what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    waits: dict[str, float] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    @property
    def worst(self) -> tuple[str, float, float]:
        """The wait that came nearest to its deadline: kind, seconds, deadline."""
        rows = [(kind, seconds, DEADLINES[kind]) for kind, seconds in self.waits.items()]
        return max(rows, key=lambda row: row[1] / row[2], default=("none", 0.0, 1.0))


@dataclass(eq=False)
class Client:
    """One client process, and how far its file was read."""

    pid: int
    report: Path
    resting: bool = False
    stopped: bool = False
    read: int = 0
    heard: float = field(default_factory=time.monotonic)


class Crew:
    """`size` clients of the daemon for `tiers`; a context. They rest until told to go."""

    def __init__(
        self, tiers: Sequence[str], folder: Path, *, size: int, prompts: int, pause: float, seed: int
    ) -> None:
        self._given = {"tiers": list(tiers), "prompts": prompts, "pause": pause}
        self._folder = folder
        self._seed = seed
        self._made = 0
        self._control = folder / "control"
        self._control.write_bytes(REST)
        self._order = os.open(self._control, os.O_WRONLY)
        self._seen = Seen()
        self._gone: list[Client] = []
        self.clients: list[Client] = []
        self.blocks = 0
        self._nursery = subprocess.Popen(
            with_parent([sys.executable, "-m", "retain.bench.chaos.nursery"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "clients.log").open("ab"),
            text=True,
        )
        self.size = size

    def __enter__(self) -> Self:
        for _ in range(self.size):
            self.clients.append(self._make())
        return self

    def __exit__(self, *_: object) -> None:
        os.pwrite(self._order, END, 0)
        if self._nursery.stdin is not None:
            self._nursery.stdin.close()
        # The clients end with the nursery, which is their parent.
        with suppress(subprocess.TimeoutExpired):
            self._nursery.wait(5)
        self._nursery.kill()
        self._nursery.wait()
        if self._nursery.stdout is not None:
            self._nursery.stdout.close()
        os.close(self._order)

    def go(self) -> None:
        """Have everyone work."""
        os.pwrite(self._order, GO, 0)

    def rest(self, seconds: float = 120.0) -> None:
        """Have everyone put down what it holds, and wait until it has. Raises CrewError."""
        os.pwrite(self._order, REST, 0)
        asked = time.monotonic()
        while True:
            self.listen()
            busy = [client.pid for client in self.clients if not client.resting or client.heard < asked]
            if not busy:
                return
            if time.monotonic() > asked + seconds:
                raise CrewError(
                    f"clients {busy} do not come to rest; their words are in {self._folder}/clients.log"
                )
            time.sleep(0.02)

    def kill(self, index: int) -> None:
        """Kill client `index` (SIGKILL) and put another in its place."""
        old = self.clients[index]
        with suppress(ProcessLookupError):
            os.kill(old.pid, signal.SIGKILL)
        self._gone.append(old)
        self.clients[index] = self._make()

    def seen(self) -> Seen:
        """What all clients have seen since this was last asked."""
        self.listen()
        seen, self._seen = self._seen, Seen()
        return seen

    @property
    def pids(self) -> list[int]:
        return [client.pid for client in self.clients]

    def _make(self) -> Client:
        self._made += 1
        report = self._folder / f"client-{self._made}.jsonl"
        given = {
            **self._given,
            "seed": self._seed * 1000 + self._made,
            "report": str(report),
            "control": str(self._control),
        }
        if self._nursery.stdin is None or self._nursery.stdout is None:
            raise CrewError("the nursery has ended")
        self._nursery.stdin.write(json.dumps(given) + "\n")
        self._nursery.stdin.flush()
        line = self._nursery.stdout.readline()
        if not line:
            words = (self._folder / "clients.log").read_text("utf-8", "replace")[-1000:]
            raise CrewError(f"no client can be made: {words}")
        return Client(int(line), report)

    def listen(self) -> None:
        """Read what the clients have told meanwhile."""
        gone, self._gone = self._gone, []
        for client in (*gone, *self.clients):
            self._hear(client)
        for client in gone:
            client.report.unlink(missing_ok=True)
        for client in self.clients:
            if not os.path.exists(f"/proc/{client.pid}"):
                words = (self._folder / "clients.log").read_text("utf-8", "replace")[-1000:]
                self._seen.raised.append(f"client {client.pid} has ended by itself: {words}")
                self.kill(self.clients.index(client))
            elif not client.stopped and time.monotonic() > client.heard + SILENT_SECONDS:
                self._seen.late.append(f"client {client.pid} has said nothing for {SILENT_SECONDS:.0f} s")
                client.heard = time.monotonic()

    def _hear(self, client: Client) -> None:
        try:
            with client.report.open("rb") as file:
                file.seek(client.read)
                data = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            return
        client.read += len(whole) + 1
        client.heard = time.monotonic()
        seen = self._seen
        for line in whole.split(b"\n"):
            told = json.loads(line)
            seen.counts.update(told["counts"])
            self.blocks += told["counts"].get("blocks", 0)
            for kind, seconds in told["waits"].items():
                seen.waits[kind] = max(seen.waits.get(kind, 0.0), seconds)
            seen.late += told["late"]
            seen.wrong += told["wrong"]
            seen.raised += told["raised"]
            client.resting = told["resting"]
