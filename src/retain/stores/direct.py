"""Direct reads: past the page cache, straight into the caller's memory, where that is measured to pay.

Only what the page cache does not hold is read so, for copying out of it is faster than any medium.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from statistics import median

ALIGNMENT = 4096
"""Of memory, offset and length. Some media ask for less, none for more."""

LEAST_BYTES = 256 << 10
"""Shorter reads are not worth the system calls that prepare them."""

SAMPLE_BYTES = 4 << 20
SPARE_BYTES = 256 << 20
"""On a disk with less room nothing is measured: the sample would be in the way."""

SAMPLES = 3
WORTH = 1.5
"""By this factor a direct read has to be cheaper in CPU time, for the page cache has its uses too."""

SLOWER = 1.1
"""By this factor it may take longer, for read-ahead overlaps reading with copying."""

_known: dict[int, bool] = {}
_lock = threading.Lock()


def pays(directory: int) -> bool:
    """Whether direct reads beat others here, by reading a file without a name, of 4 MiB, in the open
    directory, some times either way. Measured once for a device.

    False where the file system refuses, or keeps its files in memory anyway. Raises OSError where the file
    cannot be made.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_NOWAIT"):
        return False
    device = os.fstat(directory).st_dev
    with _lock:
        if device not in _known:
            _known[device] = _measure(directory)
        return _known[device]


def _measure(directory: int) -> bool:
    system = os.fstatvfs(directory)
    if system.f_bavail * system.f_frsize < SPARE_BYTES:
        return False
    file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with mmap.mmap(-1, SAMPLE_BYTES) as area, memoryview(area) as target:
            target[:] = os.urandom(ALIGNMENT) * (SAMPLE_BYTES // ALIGNMENT)
            os.pwrite(file, target, 0)
            os.fdatasync(file)
            wall: dict[bool, list[float]] = {True: [], False: []}
            spent: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * SAMPLES):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                if is_cached(file, 0):
                    return False
                direct = bool(turn % 2)
                start, cpu = time.perf_counter(), time.thread_time()
                got = read(file, target, 0) if direct else os.preadv(file, [target], 0)
                spent[direct].append(time.thread_time() - cpu)
                wall[direct].append(time.perf_counter() - start)
                if got != SAMPLE_BYTES:
                    return False
            cheaper = median(spent[False]) > WORTH * median(spent[True])
            return cheaper and SLOWER * min(wall[False]) > min(wall[True])
    finally:
        os.close(file)


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
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            return os.preadv(file, [target[:length]], offset)
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
    except OSError:
        return 0
