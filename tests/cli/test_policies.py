"""clear with its options, pin, unpin, warm: on files alone, and through the daemon that keeps them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from retain.daemon import start
from retain.daemon.client import RemoteCache
from retain.errors import ConfigError
from retain.fingerprint import kin_of_files
from retain.identity import chain, salt_of, space_of
from tests.blocks import block_at, small_spec
from tests.cli.conftest import keep
from tests.daemon.conftest import pids
from tests.engines.transformers import tiny
from tests.gateway.conftest import Serve, _servers
from tests.gateway.toy import ToyEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(folder)
    return folder


@pytest.fixture
def tiers(tmp_path: Path) -> list[str]:
    return ["--tier", "memory:8MiB", "--tier", f"disk:{tmp_path / 'kv'}"]


@pytest.fixture
def daemon(tiers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteCache]:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with start.connect(tiers[1::2]) as cache:
        yield cache
        cache.stop_daemon()
    deadline = time.monotonic() + 10
    while pids(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def serve() -> Iterator[Serve]:
    yield from _servers()


def prompts(tmp_path: Path, *tokens: list[int]) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"tokens": each}) for each in tokens))
    return file


def store(cache: RemoteCache, kin: bytes, tokens: list[int], tenant: str | None = None) -> int:
    """Keep a prompt's full blocks; how many those are."""
    prompt = chain(space_of(kin, None, salt_of(tenant)), tokens)
    spec = small_spec()
    spec = type(spec)(spec.name, spec.architecture, spec.layers, spec.dtype, kin, spec.variant)
    for index in range(len(prompt.keys)):
        assert cache.store(block_at(spec, prompt, index)).kept
    assert cache.flush()
    return len(prompt.keys)


def test_clear_takes_what_is_selected_from_files(run, tmp_path: Path) -> None:
    kept = keep(tmp_path / "kv")
    tier = ["--tier", kept.address, "--yes", "--json"]
    old = time.time() - 7200
    os.utime(kept.file(2), (old, old))
    assert json.loads(run("clear", *tier, "--older-than", "3h").stdout)["blocks"] == 0
    assert json.loads(run("clear", *tier, "--older-than", "1h").stdout)["blocks"] == 1
    assert json.loads(run("clear", *tier, "--model", (b"?" * 32).hex()).stdout)["blocks"] == 0
    assert json.loads(run("clear", *tier, "--tenant", "alice").stdout)["blocks"] == 0
    assert json.loads(run("clear", *tier, "--key", kept.names[1][:64]).stdout)["objects"] == 1
    assert json.loads(run("clear", *tier, "--model", (b"k" * 32).hex()).stdout)["blocks"] == 1
    assert not list(kept.path.rglob("*.raw"))


def test_clear_refuses_what_selects_nothing_by_name(run, tmp_path: Path) -> None:
    kept = keep(tmp_path / "kv")
    for arguments, words in (
        (["--key", "abc"], "not a key"),
        (["--older-than", "soon"], "not a duration"),
        (["--model", "no-such-model"], "no model"),
        (["--prefix", str(tmp_path / "p.txt")], "--model"),
    ):
        result = run("clear", "--tier", kept.address, "--yes", *arguments)
        assert isinstance(result.exception, ConfigError)
        assert words in str(result.exception)
    assert len(list(kept.path.rglob("*.raw"))) == 3


def test_clear_pin_and_warm_through_the_daemon(
    run, daemon: RemoteCache, tiers: list[str], model: Path, tmp_path: Path
) -> None:
    kin = kin_of_files(model)
    tokens = list(range(1024))
    assert store(daemon, kin, tokens) == 4
    store(daemon, kin, tokens, "alice")
    store(daemon, b"k" * 32, tokens)
    file = prompts(tmp_path, tokens)

    pinned = json.loads(run("pin", *tiers, "--model", model, "--prefix", file, "--json").stdout)
    assert (pinned["blocks"], pinned["objects"], pinned["missed"]) == (4, 8, [])
    assert daemon.stats().tiers["disk"].pinned == 4
    assert "4 blocks unpinned" in run("unpin", *tiers, "--model", model, "--prefix", file).stdout

    daemon.clear(tier="memory")
    warm = run("warm", model, file, *tiers, "--json")
    told = json.loads(warm.stdout)
    assert warm.exit_code == 0
    assert (told["blocks"], told["from_below"], told["from_memory"], told["missing_blocks"]) == (4, 4, 0, 0)
    assert json.loads(run("warm", model, file, *tiers, "--json").stdout)["from_memory"] == 4
    whose = run("warm", model, file, *tiers, "--tenant", "bob", "--json")
    assert json.loads(whose.stdout)["missing_blocks"] == 4
    assert whose.exit_code == 1

    gone = json.loads(run("clear", *tiers, "--model", model, "--tenant", "alice", "--yes", "--json").stdout)
    assert gone["blocks"] == 4
    assert [(each["tier"], each["objects"]) for each in gone["tiers"]] == [("memory", 0), ("disk", 4)]
    gone = json.loads(run("clear", *tiers, "--model", model, "--prefix", file, "--yes", "--json").stdout)
    assert (gone["blocks"], gone["objects"]) == (4, 8)
    assert daemon.stats().tiers["disk"].objects == 4
    assert "4 blocks removed" in run("clear", *tiers, "--yes").stdout


def test_pins_without_a_daemon_are_refused(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    kept = keep(tmp_path / "kv")
    assert "daemon" in str(run("pin", "--tier", kept.address, "--tenant", "alice").exception)
    assert "what to pin" in str(run("pin", "--tier", kept.address).exception)


def test_warm_has_a_server_compute_texts_and_tokens(run, serve: Serve, tmp_path: Path) -> None:
    server = serve(ToyEngine())
    file = tmp_path / "p.json"
    file.write_text(json.dumps(["a text " * 40, {"tokens": [1, 2, 3]}]))
    (tmp_path / "q.txt").write_text("another text")
    told = json.loads(
        run("warm", "smollm2", file, tmp_path / "q.txt", "--compute", "--server", server.url, "--json").stdout
    )
    assert told["prompts"] == 3
    assert told["left_prompts"] == 0
    assert told["tokens"] == told["reused_tokens"] + told["computed_tokens"] > 3
    gone = run("warm", "smollm2", file, "--compute", "--server", "http://127.0.0.1:9", "--json")
    assert "cannot be asked" in str(gone.exception)


def test_quotas_and_times_of_the_configuration_are_in_the_tiers(run, tmp_path: Path) -> None:
    file = tmp_path / "retain.yaml"
    file.write_text(
        "tiers: ['memory:1GiB', 'disk:/kv?quota.alice=1GiB']\nquotas: [5GiB, alice=20GiB]\nttls: [7d]\n"
    )
    shown = json.loads(run("--config", file, "config", "show", "--json").stdout)
    assert shown["tiers"]["value"] == [
        "memory:1GiB?quota=5GiB&quota.alice=20GiB&ttl=7d",
        "disk:/kv?quota=5GiB&quota.alice=1GiB&ttl=7d",
    ]
