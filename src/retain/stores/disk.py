"""The disk store: one file an object, written under a temporary name and renamed.

    PATH/ab/abcdef...         an object; `ab` are the first two characters of its name
    PATH/.writing/ID.lock     held (flock) by an open store; the kernel lets go of it when its process ends
    PATH/.writing/ID.RANDOM   an object on its way

Several processes may use one directory, over NFS too: objects appear by rename, and locks only keep what is
unfinished from being taken for an orphan. What the page cache does not hold is read past it where that is
measured to pay (`stores.direct`). Nothing is synced to the medium: after a power cut an object may be
damaged, and its checksums tell.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from retain.errors import StoreFull, StoreUnavailable
from retain.stores import direct
from retain.stores.base import Buffer, StoredObject, as_bytes, check_name, check_offset

log = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, lest a FIFO that somebody left among the objects holds up a reader.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITING = ".writing"
_MOST_CHUNKS = 1024  # IOV_MAX of Linux


class DiskStore:
    """Objects in the directory `path`, made with mode 0700 if need be.

    Opening removes what writers that have died left half written. Raises StoreUnavailable when the directory
    cannot be used. Symbolic links below `path` are not followed.
    """

    kind = "disk"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._owner = os.getpid()
        with _translated(f"the directory {self.path} cannot be used"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as opened:
                self._objects = _open(opened, self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with suppress(FileExistsError):
                    os.mkdir(_WRITING, 0o700, dir_fd=self._objects)
                self._writing = _open(opened, _WRITING, _DIRECTORY, self._objects)
                self._session, self._session_lock = _begin_session(self._writing)
                opened.callback(os.close, self._session_lock)
                _remove_orphans(self._writing, self.path)
                opened.pop_all()
        self._direct = direct.Pays()
        self._measuring = threading.Lock()
        self._measured = threading.Event()

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        check_name(name)
        parts = [part for part in map(as_bytes, chunks) if len(part)]
        temporary = f"{self._session}.{secrets.token_hex(8)}"
        with self._call(), _translated(f"the object {name} could not be written"):
            file = os.open(temporary, _CREATE, 0o600, dir_fd=self._writing)
            try:
                try:
                    self._write_parts(file, parts)
                finally:
                    os.close(file)  # may be where a network file system tells that there is no room
                shard = self._shard(name, make=True)
                try:
                    os.rename(temporary, name, src_dir_fd=self._writing, dst_dir_fd=shard)
                finally:
                    os.close(shard)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._writing)
                raise

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        check_offset(offset)
        target = as_bytes(buffer)
        with self.opened(name) as file:
            if file is None:
                return 0
            done = 0
            cold = len(target) >= direct.LEAST_BYTES and not direct.is_cached(file, offset)
            if cold and self.pays_directly().reads:
                done = direct.read(file, target, offset)
            while done < len(target):
                got = os.preadv(file, [target[done:]], offset + done)
                if got == 0:
                    break
                done += got
            return done

    def size(self, name: str) -> int | None:
        with self.opened(name) as file:
            return None if file is None else os.fstat(file).st_size

    def delete(self, name: str) -> bool:
        check_name(name)
        with self._call(), _translated(f"the object {name} could not be deleted"):
            try:
                shard = self._shard(name)
            except OSError as error:
                return _nothing_there(error)
            try:
                os.unlink(name, dir_fd=shard)
            except OSError as error:
                return _nothing_there(error)
            finally:
                os.close(shard)
            return True

    def scan(self) -> Iterator[StoredObject]:
        with self._call(), _translated(f"the objects in {self.path} could not be listed"):
            shards = sorted(name for name in os.listdir(self._objects) if len(name) <= 2 and _is_name(name))
        for shard in shards:
            with self._call(), _translated(f"the objects in {self.path} could not be listed"):
                found = list(self._scan_shard(shard))
            yield from found

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._calls == 0
        if last:
            self._let_go()

    def pays_directly(self, wait: float = 0.0) -> direct.Pays:
        """Whether large objects are read and written past the page cache; waits so many seconds for the
        measurement."""
        if not self._measured.is_set():
            if self._measuring.acquire(blocking=False):  # once, when it is first of interest
                threading.Thread(target=self._measure, name="retain-disk", daemon=True).start()
            self._measured.wait(wait)
        return self._direct

    def _write_parts(self, file: int, parts: list[memoryview]) -> None:
        if parts and len(parts[0]) >= direct.LEAST_BYTES and self.pays_directly().writes:
            done = direct.write(file, parts[0])
            parts = [parts[0][done:], *parts[1:]] if done < len(parts[0]) else parts[1:]
        _write_rest(file, parts)

    def _measure(self) -> None:
        try:
            with self._call():
                self._direct = direct.pays(self._writing)
        except (OSError, StoreUnavailable) as error:
            log.debug("whether direct reads pay in %s could not be measured: %s", self.path, error)
        finally:
            self._measured.set()

    def _scan_shard(self, shard: str) -> Iterator[StoredObject]:
        try:
            directory = os.open(shard, _DIRECTORY, dir_fd=self._objects)
        except OSError as error:
            _nothing_there(error)
            return
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name[:2] != shard or not _is_name(entry.name):
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield StoredObject(entry.name, status.st_size, status.st_mtime)
        finally:
            os.close(directory)

    def _shard(self, name: str, *, make: bool = False) -> int:
        """The open directory that object `name` belongs in."""
        shard = name[:2]
        try:
            return os.open(shard, _DIRECTORY, dir_fd=self._objects)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            os.mkdir(shard, 0o700, dir_fd=self._objects)
        return os.open(shard, _DIRECTORY, dir_fd=self._objects)

    def file_of(self, name: str) -> Path:
        """Where object `name` lies, or would lie."""
        return self.path / check_name(name)[:2] / name

    @contextmanager
    def opened(self, name: str) -> Iterator[int | None]:
        """The open file of object `name`, None if there is none: one version of it, whatever is written
        meanwhile."""
        check_name(name)
        with self._call(), _translated(f"the object {name} could not be read"):
            file = None
            try:
                shard = self._shard(name)
                try:
                    file = os.open(name, _READ, dir_fd=shard)
                finally:
                    os.close(shard)
            except OSError as error:
                _nothing_there(error)
            if file is None:
                yield None
                return
            try:
                yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
            finally:
                os.close(file)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keep the store's directories open while a call runs, whoever closes the store meanwhile."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the disk store is closed")
            self._calls += 1
        try:
            yield
        finally:
            if self._ends_last_call():
                self._let_go()

    def _ends_last_call(self) -> bool:
        with self._lock:
            self._calls -= 1
            return self._closed and self._calls == 0

    def _let_go(self) -> None:
        if os.getpid() == self._owner:  # not in a forked process, whose parent may still be writing
            with suppress(OSError):
                os.unlink(f"{self._session}.lock", dir_fd=self._writing)
        for descriptor in (self._session_lock, self._writing, self._objects):
            os.close(descriptor)


def _write_rest(file: int, parts: Sequence[memoryview]) -> None:
    left = list(parts)
    while left:
        done = os.writev(file, left[:_MOST_CHUNKS])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


def _open(opened: ExitStack, path: str | Path, flags: int, directory: int | None = None) -> int:
    descriptor = os.open(path, flags, dir_fd=directory)
    opened.callback(os.close, descriptor)
    return descriptor


def _begin_session(writing: int) -> tuple[str, int]:
    """An id for this store's temporary files, and the open lock file that says that their writer is alive."""
    while True:
        session = f"{os.getpid()}-{secrets.token_hex(8)}"
        lock = os.open(f"{session}.lock", _CREATE, 0o600, dir_fd=writing)
        try:
            with suppress(OSError):  # no locks on this file system: then nothing is ever taken for an orphan
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _same_file(writing, f"{session}.lock", lock):
                return session, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # another store took it for an orphan before it was locked


def _remove_orphans(writing: int, path: Path) -> None:
    """Remove temporary files whose writer is gone, which is to say that nobody holds its lock.

    That holds across containers, reboots and reused process ids. A session's lock file is made before its
    first temporary file and removed after its last.
    """
    sessions: dict[str, list[str]] = {}
    for name in os.listdir(writing):
        session, dot, _ = name.partition(".")
        if dot:
            sessions.setdefault(session, []).append(name)
    removed = 0
    for session, names in sessions.items():
        with _orphaned(writing, f"{session}.lock") as orphaned:
            if not orphaned:
                continue
            for name in names:
                if not name.endswith(".lock"):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=writing)
                        removed += 1
    if removed:
        log.info("removed %d unfinished files from %s, left by writers that are gone", removed, path)


@contextmanager
def _orphaned(writing: int, lock_name: str) -> Iterator[bool]:
    """Whether a session's writer is gone; its lock file is held meanwhile, and removed then."""
    try:
        lock = os.open(lock_name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=writing)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
        if _same_file(writing, lock_name, lock):
            os.unlink(lock_name, dir_fd=writing)
    finally:
        os.close(lock)


def _same_file(directory: int, name: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _is_name(name: str) -> bool:
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def _nothing_there(error: OSError) -> bool:
    """False for an error that means that there is no such object; raises every other."""
    if error.errno not in _NOTHING_THERE:
        raise error
    return False


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StoreFull if error.errno in _NO_ROOM else StoreUnavailable
        raise kind(f"{what}: {error.strerror or error}") from error
