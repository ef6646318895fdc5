"""A home folder of its own and a disk tier with a few blocks, for the tests of commands."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import retain
from retain.cli.app import app
from tests.blocks import block_at, chain_of, small_spec

BLOCKS = 3


@dataclass(frozen=True)
class Kept:
    """A disk tier and what lies in it: the object's names and files, in chain order."""

    path: Path
    names: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"disk:{self.path}"

    def file(self, number: int) -> Path:
        (found,) = self.path.rglob(self.names[number])
        return found

    def damage(self, number: int) -> None:
        """Flip a bit in the last byte of an object."""
        data = bytearray(self.file(number).read_bytes())
        data[-1] ^= 1
        self.file(number).write_bytes(data)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Commands see neither the settings nor the files of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RETAIN_DATA", raising=False)
    return tmp_path / "home"


@pytest.fixture(params=["raw", "lossless"])
def kept(request, tmp_path) -> Kept:
    return keep(tmp_path / "kv", request.param)


def keep(path: Path, codec: str = "raw") -> Kept:
    """A disk tier with a chain of three blocks."""
    spec, chain = small_spec(), chain_of(range(16 * BLOCKS))
    with retain.open("memory:16MiB", f"disk:{path}?codec={codec}") as cache:
        for number in range(BLOCKS):
            assert cache.store(block_at(spec, chain, number)).kept
        assert cache.flush()
    names = {file.name.partition(".")[0]: file.name for file in path.rglob(f"*.{codec}")}
    return Kept(path, tuple(names[key.hex()] for key in chain.keys))


@pytest.fixture
def run():
    """Run a command in this process: its exit code, stdout and stderr."""

    def call(*arguments: object, **more: object) -> Result:
        return CliRunner().invoke(app, [str(each) for each in arguments], **more)

    return call
