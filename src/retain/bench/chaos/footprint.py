"""What processes have open and hold at a moment, read from /proc: what must not grow with the faults."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Footprint:
    """One process: descriptors by what they are, threads, bytes of memory of its own, unburied children."""

    files: int
    sockets: int
    others: int
    threads: int
    own_bytes: int
    zombies: int


def footprint(pid: int) -> Footprint | None:
    """The footprint of a process, None where it is gone. The arena's memory is shared, and not its own."""
    kinds = {"files": 0, "sockets": 0, "others": 0}
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            kind = (
                "sockets" if target.startswith("socket:") else "files" if target.startswith("/") else "others"
            )
            kinds[kind] += 1
    values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    own = int(values.get("RssAnon", "0 kB").split()[0]) << 10
    zombies = sum(parent == pid and state == "Z" for _, parent, state in processes())
    return Footprint(
        kinds["files"], kinds["sockets"], kinds["others"], int(values.get("Threads", "0")), own, zombies
    )


def processes() -> list[tuple[int, int, str]]:
    """Every process of the machine: id, parent's id, state."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                found.append((int(entry), int(fields[1]), fields[0]))
    return found


def daemons(folder: Path) -> list[int]:
    """The daemons, alive, whose sockets lie in the runtime folder `folder`."""
    found = []
    for pid, _, state in processes():
        if state != "Z":
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--socket" in command and any(each.startswith(os.fsencode(folder)) for each in command):
                    found.append(pid)
    return found


def leftovers(folder: Path, writers: int) -> list[str]:
    """What a disk tier's folder has of unfinished objects, and of locks beyond those of `writers` alive."""
    try:
        names = os.listdir(folder / ".writing")
    except FileNotFoundError:
        return []
    unfinished = [name for name in names if not name.endswith(".lock")]
    locks = len(names) - len(unfinished)
    found = []
    if unfinished:
        found.append(f"{len(unfinished)} unfinished objects in {folder.name}")
    if locks > writers:
        found.append(f"{locks} locks of {writers} writers in {folder.name}")
    return found


def object_bytes(folder: Path) -> int:
    """The bytes of all objects in a disk tier's folder."""
    total = 0
    for shard in folder.iterdir():
        if len(shard.name) == 2:
            with os.scandir(shard) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        total += entry.stat().st_size
    return total
