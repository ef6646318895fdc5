"""Files by the bare calls of the kernel: what a disk tier is measured against."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt


def write_file(path: str, data: npt.NDArray[np.uint8]) -> None:
    """A fresh file by bare pwrite."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        view, at = data.data, 0
        while at < len(view):
            at += os.pwrite(descriptor, view[at:], at)
    finally:
        os.close(descriptor)


def read_file(path: str, out: memoryview) -> None:
    """A file by bare pread, into `out`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < len(out):
            read = os.preadv(descriptor, [out[at:]], at)
            if not read:
                raise EOFError(f"{path} ends after {at} bytes")
            at += read
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Have the kernel drop the file from its page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
