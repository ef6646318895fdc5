"""Runs a program under a wall clock that jumps: `python -m retain.bench.chaos.clock FILE MODULE ARGUMENTS`.

FILE holds the seconds by which the clock is wrong, one double, read at every look at the clock. The machine's
clock is left alone.
"""

from __future__ import annotations

import mmap
import os
import runpy
import struct
import sys
import time
from pathlib import Path

_WRONG_BY = struct.Struct("<d")


def set_clock(path: Path, seconds: float) -> None:
    """Have every program under the clock of `path` see the time wrong by `seconds` from now on."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, _WRONG_BY.pack(seconds), 0)
    finally:
        os.close(file)


def main() -> None:
    """Put the clock in place, then run the module as if it had been started itself."""
    with open(sys.argv[1], "rb") as file:
        held = mmap.mmap(file.fileno(), _WRONG_BY.size, prot=mmap.PROT_READ)
    seconds, nanoseconds = time.time, time.time_ns

    def wrong_by() -> float:
        return float(_WRONG_BY.unpack_from(held)[0])

    time.time = lambda: seconds() + wrong_by()
    time.time_ns = lambda: nanoseconds() + int(wrong_by() * 1e9)
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
