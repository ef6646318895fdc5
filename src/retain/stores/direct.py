"""Direct reads and writes: past the page cache, between the medium and the caller's memory, where it pays.

Whether it pays is measured. Only what the page cache does not hold is read so, for copying out of it is
faster than any medium. What is written was in memory, and stays there as long as it is worth it: a second
copy in the page cache costs the processor more than the write itself, mostly for pages that are new.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

ALIGNMENT = 4096
"""Of memory, offset and length. Some media ask for less, none for more."""

LEAST_BYTES = 256 << 10
"""Shorter ones are not worth the system calls that prepare them."""

SAMPLE_BYTES = 4 << 20
SPARE_BYTES = 256 << 20
"""On a disk with less room nothing is measured: the sample would be in the way."""

SAMPLES = 3
WORTH = 1.5
"""By this factor the direct way has to be cheaper in CPU time, for the page cache has its uses too."""

SLOWER = 1.1
"""By this factor a direct read may take longer, for read-ahead overlaps reading with copying."""

SLOWER_WRITE = 4.0
"""By this factor a direct write may take longer: nobody waits for it, and it has reached the medium then."""


class Pays(NamedTuple):
    """What pays in one place."""

    reads: bool = False
    writes: bool = False


_known: dict[int, Pays] = {}
_lock = threading.Lock()


def pays(directory: int) -> Pays:
    """Whether direct reads and writes beat others here, with a file without a name, of 4 MiB, in the open
    directory, some times either way. Measured once for a device.

    Neither does where the file system refuses, or keeps its files in memory anyway. Raises OSError where the
    file cannot be made.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_NOWAIT"):
        return Pays()
    device = os.fstat(directory).st_dev
    with _lock:
        if device not in _known:
            _known[device] = _measure(directory)
        return _known[device]


def _measure(directory: int) -> Pays:
    system = os.fstatvfs(directory)
    if system.f_bavail * system.f_frsize < SPARE_BYTES:
        return Pays()
    file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with mmap.mmap(-1, SAMPLE_BYTES) as area, memoryview(area) as sample:
            sample[:] = os.urandom(ALIGNMENT) * (SAMPLE_BYTES // ALIGNMENT)
            return Pays(writes=_writes_pay(file, sample), reads=_reads_pay(file, sample))
    finally:
        os.close(file)


def _writes_pay(file: int, sample: memoryview) -> bool:
    """Leaves the sample in the file, on its medium."""

    def once(direct: bool) -> int:
        return write(file, sample) if direct else os.pwrite(file, sample, 0)

    turns = []
    for turn in range(2 * SAMPLES):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        turns.append(_timed(once, bool(turn % 2)))
    os.pwrite(file, sample, 0)
    os.fdatasync(file)
    return _pays(turns, SLOWER_WRITE)


def _reads_pay(file: int, target: memoryview) -> bool:
    def once(direct: bool) -> int:
        return read(file, target, 0) if direct else os.preadv(file, [target], 0)

    turns = []
    for turn in range(2 * SAMPLES):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(file, 0):
            return False
        turns.append(_timed(once, bool(turn % 2)))
    return _pays(turns, SLOWER)


class _Turn(NamedTuple):
    direct: bool
    whole: bool
    wall: float  # seconds, as the next
    cpu: float


def _timed(once: Callable[[bool], int], direct: bool) -> _Turn:
    start, cpu = time.perf_counter(), time.thread_time()
    done = once(direct)
    spent = time.thread_time() - cpu
    return _Turn(direct, done == SAMPLE_BYTES, time.perf_counter() - start, spent)


def _pays(turns: list[_Turn], slower: float) -> bool:
    ways = [[turn for turn in turns if turn.direct is direct] for direct in (True, False)]
    cpu, cached_cpu = (median(turn.cpu for turn in way) for way in ways)
    wall, cached_wall = (min(turn.wall for turn in way) for way in ways)
    return all(turn.whole for turn in turns) and cached_cpu > WORTH * cpu and slower * cached_wall > wall


def is_cached(file: int, offset: int) -> bool:
    """Whether the page cache has the byte at `offset`. True also where that cannot be told."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) != 0
    except BlockingIOError:
        return False
    except OSError:
        return True


def read(file: int, target: memoryview, offset: int) -> int:
    """Read what can be read directly of `target`, from `offset` of an open file; the bytes read, 0 where the
    rest has to be read otherwise: an end that is not aligned, or a file system that refuses.
    """
    length = len(target) // ALIGNMENT * ALIGNMENT
    if not length or offset % ALIGNMENT:
        return 0
    return _directly(file, lambda: os.preadv(file, [target[:length]], offset))


def write(file: int, source: memoryview) -> int:
    """Write what can be written directly of `source`, from where an open file stands; the bytes written, 0
    where it has to be written otherwise, as `read`. Raises OSError where there is no room.
    """
    length = len(source) // ALIGNMENT * ALIGNMENT
    return _directly(file, lambda: os.write(file, source[:length])) if length else 0


def _directly(file: int, call: Callable[[], int]) -> int:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            return call()
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return 0
