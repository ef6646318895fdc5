"""Commands and encrypted tiers: read with the key, left alone without it."""

import json
import os

import pytest
from typer.testing import CliRunner

import retain
from retain.cli.app import app
from tests.blocks import block_at, chain_of, small_spec

pytest.importorskip("cryptography")


def test_verify_reads_sealed_objects_with_their_key_and_deletes_none_without_it(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(os.urandom(32).hex() + "\n")
    plain = f"disk:{tmp_path / 'kv'}"
    sealed = f"{plain}?keys=file:{keys}"
    with retain.open("memory:8MiB", sealed) as cache:
        for index in range(4):
            assert cache.store(block_at(small_spec(), chain_of(range(64)), index)).kept
    run = CliRunner()

    def verify(*arguments):
        result = run.invoke(app, ["verify", "--json", "--tier", *arguments])
        return result.exit_code, json.loads(result.stdout)

    assert verify(sealed) == (0, {"checked": 4, "bad": []})
    code, told = verify(plain, "--delete")
    assert code == 1
    assert [row["removed"] for row in told["bad"]] == [False] * 4
    assert verify(sealed) == (0, {"checked": 4, "bad": []})
