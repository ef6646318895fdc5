"""The disk store keeps the contract, and survives full disks, killed writers and hostile directories."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Store
from retain.stores.disk import DiskStore
from retain.testing.store import StoreConformance, read

MIB = 1 << 20
WRITING = ".writing"


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes; skips the test where none can be mounted."""
    directory.mkdir(exist_ok=True)
    options = f"size={size},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "retain-test", directory], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


class TestDiskStore(StoreConformance):
    persistent = True

    def make_store(self, directory: Path) -> Store:
        return DiskStore(directory / "objects")

    @pytest.fixture(autouse=True)
    def mounts(self) -> Iterator[None]:
        with contextlib.ExitStack() as self._mounts:
            yield

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        return DiskStore(self._mounts.enter_context(small_disk(directory / "disk", capacity)))


def leftovers(path: Path) -> list[str]:
    """What lies in the folder of unfinished files, lock files aside."""
    return sorted(each.name for each in (path / WRITING).iterdir() if each.suffix != ".lock")


def locks(path: Path) -> list[str]:
    return sorted(each.name for each in (path / WRITING).iterdir() if each.suffix == ".lock")


# where things lie


def test_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = DiskStore(tmp_path / "a" / "objects")
        store.write("abcdef", [b"data"])
    finally:
        os.umask(old)
    file = store.file_of("abcdef")
    assert file == tmp_path / "a" / "objects" / "ab" / "abcdef"
    assert file.read_bytes() == b"data"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (store.path, file.parent, store.path / WRITING):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"/file cannot be used"):
        DiskStore(tmp_path / "file")
    with pytest.raises(StoreUnavailable, match=r"/file/below cannot be used"):
        DiskStore(tmp_path / "file" / "below")


def test_files_that_are_no_objects_are_left_alone_and_not_listed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.write("abcdef", [b"data"])
    for name in ("README", "ab/README", "ab/.abhidden", "ab/ab cd", "abc/abcdef", "zz/abcdef"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "ab" / "abfolder").mkdir()
    os.mkfifo(tmp_path / "ab" / "abfifo")
    assert [each.name for each in store.scan()] == ["abcdef"]
    for name in ("abfolder", "abfifo"):
        assert store.size(name) is None
        assert store.read_into(name, memoryview(bytearray(4))) == 0
    assert DiskStore(tmp_path).size("abcdef") == 4
    assert (tmp_path / "zz" / "abcdef").exists()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "zz-secret").write_bytes(b"secret")
    store = DiskStore(tmp_path / "objects")
    store.write("abcdef", [b"data"])
    (store.path / "ab" / "ablink").symlink_to(secret / "zz-secret")
    (store.path / "zz").symlink_to(secret)
    for name in ("ablink", "zz-secret"):
        assert store.size(name) is None
        assert store.read_into(name, memoryview(bytearray(6))) == 0
    assert [each.name for each in store.scan()] == ["abcdef"]
    assert store.delete("zz-secret") is False
    with pytest.raises(StoreUnavailable):
        store.write("zz-secret", [b"overwritten"])
    assert leftovers(store.path) == []
    store.write("ablink", [b"mine"])
    assert read(store, "ablink") == b"mine"
    assert (secret / "zz-secret").read_bytes() == b"secret"


def test_a_folder_that_is_removed_under_the_store_is_misses_and_not_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.write("abcdef", [b"data"])
    (tmp_path / "ab" / "abcdef").unlink()
    (tmp_path / "ab").rmdir()
    assert store.size("abcdef") is None
    assert store.read_into("abcdef", memoryview(bytearray(4))) == 0
    store.write("abcdef", [b"again"])
    assert read(store, "abcdef") == b"again"


def test_two_stores_of_one_folder_see_each_others_objects(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path), DiskStore(tmp_path)
    one.write("abcdef", [b"one"])
    assert read(other, "abcdef") == b"one"
    other.write("abcdef", [b"other"])
    assert read(one, "abcdef") == b"other"
    other.close()
    assert one.delete("abcdef")


# failing media


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        store = DiskStore(disk)
        store.write("abcdef", [b"x" * MIB])
        with pytest.raises(StoreFull, match="No space left"):
            store.write("abcdeg", [b"y" * MIB, b"y" * MIB])
        with pytest.raises(StoreFull):
            store.write("abcdef", [b"z" * (2 * MIB)])
        assert leftovers(disk) == []
        assert read(store, "abcdef") == b"x" * MIB
        assert [each.name for each in store.scan()] == ["abcdef"]
        store.write("abcdeg", [b"y" * (MIB // 2)])
        store.close()
        assert list((disk / WRITING).iterdir()) == []


def test_a_disk_without_inodes_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        subprocess.run(["mount", "-o", "remount,nr_inodes=12", disk], check=True)
        store = DiskStore(disk)
        written = 0
        with pytest.raises(StoreFull):  # noqa: PT012 - which of them is refused is the file system's matter
            for number in range(20):
                store.write(f"ab{number}", [b"x"])
                written += 1
        assert len(list(store.scan())) == written > 0
        assert leftovers(disk) == []
        store.close()


def test_a_read_only_disk_is_named_when_the_store_is_opened(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        DiskStore(disk).close()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StoreUnavailable, match="Read-only"):
            DiskStore(disk)


def test_a_file_larger_than_the_process_may_write_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, old[1]))
    try:
        with pytest.raises(StoreFull):
            store.write("abcdef", [b"x" * MIB, b"y"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert leftovers(tmp_path) == []
    assert store.size("abcdef") is None


@pytest.mark.parametrize("call", ["writev", "close", "rename", "open"])
@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StoreUnavailable), (errno.EDQUOT, StoreFull)])
def test_a_failing_system_call_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[Exception]
) -> None:
    store = DiskStore(tmp_path)
    store.write("abcdef", [b"old"])
    real: Callable[..., Any] = getattr(os, call)

    def fail(*args: Any, **options: Any) -> Any:
        if call == "close":
            real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(kind, match="abcdef could not be written"):
        store.write("abcdef", [b"new", b"er"])
    monkeypatch.undo()
    assert leftovers(tmp_path) == []
    assert read(store, "abcdef") == b"old"


def test_an_object_that_cannot_be_read_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    store.write("abcdef", [b"data"])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreUnavailable, match="abcdef could not be read"):
        store.read_into("abcdef", memoryview(bytearray(4)))


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(5).randbytes(10_000)
    real_write, real_read = os.writev, os.preadv
    monkeypatch.setattr(
        os, "writev", lambda file, parts: real_write(file, [next(p for p in parts if p)[:700]])
    )
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: real_read(file, [parts[0][:333]], at))
    store = DiskStore(tmp_path)
    store.write("abcdef", [data[:1], data[1:1500], data[1500:]])
    assert store.file_of("abcdef").read_bytes() == data
    assert read(store, "abcdef") == data


# writers that die


WRITER = """
import os, random, sys
from retain.stores.disk import DiskStore

store = DiskStore(sys.argv[1])
chance = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    number = chance.randrange(60)
    size = chance.randrange(1, 3_000_000)
    data = number.to_bytes(4, "little") + size.to_bytes(4, "little") + bytes([number]) * size
    store.write(f"{number:02}.object", [data[:1000], data[1000:]])
"""


def start(path: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert says_ready(writer)
    return writer


def says_ready(writer: subprocess.Popen[str]) -> bool:
    assert writer.stdout is not None
    return writer.stdout.readline() == "ready\n"


def let_go_on(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("\n")
    writer.stdin.flush()


def close(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.close()
    writer.stdout.close()


def kill(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(30) == -signal.SIGKILL
    close(writer)


@pytest.mark.slow
def test_killed_writers_leave_whole_objects_and_no_temporary_files(tmp_path: Path) -> None:
    chance = random.Random(8)
    left = 0
    for turn in range(30):
        writer = start(tmp_path, WRITER, str(turn))
        time.sleep(chance.uniform(0, 0.05))
        kill(writer)
        left += len(leftovers(tmp_path))
        store = DiskStore(tmp_path)
        assert leftovers(tmp_path) == []
        assert len(locks(tmp_path)) == 1
        for each in store.scan():
            data = read(store, each.name)
            assert data is not None
            number, size = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")
            assert each.name == f"{number:02}.object"
            assert data[8:] == bytes([number]) * size
        store.close()
        assert locks(tmp_path) == []
    assert left > 0, "no writer was killed while it wrote, so nothing was tested"
    assert any(tmp_path.glob("??/*"))


SLOW_WRITER = """
import os, sys, time
from retain.stores.disk import DiskStore

store = DiskStore(sys.argv[1])
real = os.writev

def stop(file, parts):
    done = real(file, [parts[0][:10]])
    print("ready", flush=True)
    sys.stdin.readline()
    return done

os.writev = stop
store.write("abcdef", [b"x" * 20, b"y" * 20])
"""


def test_a8_only_the_files_of_dead_writers_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="retain")
    DiskStore(tmp_path).write("abcdeg", [b"kept"])
    writer = start(tmp_path, SLOW_WRITER)
    assert len(leftovers(tmp_path)) == 1

    living = DiskStore(tmp_path)
    assert len(leftovers(tmp_path)) == 1, "a live writer's file was removed"
    assert [each.name for each in living.scan()] == ["abcdeg"]
    living.close()

    kill(writer)
    assert len(leftovers(tmp_path)) == 1
    store = DiskStore(tmp_path)
    assert leftovers(tmp_path) == []
    assert "removed 1 unfinished files" in caplog.text
    assert {each.name: each.size for each in store.scan()} == {"abcdeg": 4}
    assert read(store, "abcdeg") == b"kept"


def test_a8_a_writer_that_goes_on_after_another_opened_the_folder_loses_nothing(tmp_path: Path) -> None:
    writer = start(tmp_path, SLOW_WRITER)
    for _ in range(3):
        DiskStore(tmp_path).close()
        let_go_on(writer)
        assert says_ready(writer)
    let_go_on(writer)
    assert writer.wait(30) == 0
    close(writer)
    assert read(DiskStore(tmp_path), "abcdef") == b"x" * 20 + b"y" * 20


def test_a8_a_process_id_that_was_given_out_again_protects_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    for name in (f"{os.getpid()}-0123.aaaa", "1-4567.bbbb", "1-4567.lock"):
        (tmp_path / WRITING / name).write_bytes(b"left")
    store = DiskStore(tmp_path)
    assert leftovers(tmp_path) == []
    assert len(locks(tmp_path)) == 1
    store.close()


def test_stores_that_open_and_close_at_once_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for turn in range(40):
                store = DiskStore(tmp_path)
                store.write(f"{worker}.{turn}", [bytes(1000)])
                store.close()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == []
    assert sum(1 for _ in tmp_path.glob("?.*/*")) + sum(1 for _ in tmp_path.glob("?/*")) == 240
    assert list((tmp_path / WRITING).iterdir()) == []


def test_a_close_waits_for_no_one_and_breaks_no_call(tmp_path: Path) -> None:
    for turn in range(20):
        store = DiskStore(tmp_path / str(turn))
        outcomes: list[str] = []

        def work(store: DiskStore = store, outcomes: list[str] = outcomes) -> None:
            try:
                for number in range(1000):
                    store.write(f"ab{number % 10}", [bytes(10_000)])
            except StoreUnavailable as error:
                outcomes.append(str(error))

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        time.sleep(0.005)
        store.close()
        for worker in workers:
            worker.join(60)
        assert outcomes == ["the disk store is closed"] * 3
        assert list((tmp_path / str(turn) / WRITING).iterdir()) == []


def test_a_forked_process_that_closes_its_copy_leaves_the_parents_store_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    held = locks(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            store.write("abcdef", [b"child"])
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert locks(tmp_path) == held
    assert read(store, "abcdef") == b"child"
    store.close()
    assert locks(tmp_path) == []


def test_open_files_do_not_pile_up(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    store = DiskStore(tmp_path)
    for number in range(300):
        store.write(f"{number:03}", [b"x"])
        store.read_into(f"{number:03}", memoryview(bytearray(1)))
        store.size("nothing")
        store.delete(f"{number + 1:03}")
    list(store.scan())
    assert count() <= before + 3
    store.close()
    assert count() == before


def test_a23_an_object_larger_than_any_default_is_kept(tmp_path: Path) -> None:
    size = 300 * MIB
    chunk = random.Random(1).randbytes(MIB)
    store = DiskStore(tmp_path)
    store.write("abcdef", [chunk] * 300)
    assert store.size("abcdef") == size
    buffer = bytearray(3)
    assert store.read_into("abcdef", memoryview(buffer), size - 3) == 3
    assert buffer == chunk[-3:]
    store.delete("abcdef")
