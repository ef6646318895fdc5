"""ls, show, verify, clear, stats: what commands tell of a disk tier is true."""

import json

import pytest

from retain.errors import ConfigError, InvalidObject
from tests.blocks import chain_of, small_spec
from tests.cli.conftest import BLOCKS, keep


def test_ls_tells_every_object_of_a_tier(run, kept):
    rows = json.loads(run("ls", "--tier", kept.address, "--json").stdout)
    assert sorted(row["name"] for row in rows) == sorted(kept.names)
    for row in rows:
        number = kept.names.index(row["name"])
        assert row["first"] == 16 * number
        assert row["tokens"] == 16
        assert row["model"] == "small"
        assert row["fidelity"] == "exact"
        assert row["codec"] == row["name"].rpartition(".")[2]
        assert row["size_bytes"] == kept.file(number).stat().st_size


def test_ls_prints_keys_that_show_finds(run, kept):
    table = run("ls", "--tier", kept.address).stdout
    assert f"{BLOCKS} objects" in table
    for name in kept.names:
        assert name[:16] in table
        assert run("show", name[:16], "--tier", kept.address).exit_code == 0


def test_ls_and_stats_name_an_object_whose_header_is_broken(run, kept):
    kept.file(1).write_bytes(b"nonsense")
    rows = json.loads(run("ls", "--tier", kept.address, "--json").stdout)
    problems = {row["name"]: row.get("problem") for row in rows}
    assert problems[kept.names[1]]
    assert problems[kept.names[0]] is None
    assert "unreadable" in run("ls", "--tier", kept.address).stdout
    held = json.loads(run("stats", "--tier", kept.address, "--json").stdout)["rows"]
    assert {row["model"]: row["objects"] for row in held} == {"small": BLOCKS - 1, "(unreadable)": 1}


def test_the_tier_comes_from_the_settings_where_no_flag_names_one(run, kept, monkeypatch):
    monkeypatch.setenv("RETAIN_TIERS", f"memory:1GiB,{kept.address}")
    assert len(json.loads(run("ls", "--json").stdout)) == BLOCKS


def test_show_prints_the_header_and_says_why_there_is_no_text(run, kept):
    chain = chain_of(range(16 * BLOCKS))
    told = json.loads(run("show", kept.names[1], "--tier", kept.address, "--json").stdout)
    assert told["key"] == chain.keys[1].hex()
    assert told["parent"] == chain.keys[0].hex()
    assert told["kin"] == small_spec().kin.hex()
    assert told["token_ids"] == list(range(16, 32))
    assert told["text"] is None
    shown = run("show", kept.names[1], "--tier", kept.address, "--model", "absent")
    assert "16 17 18" in shown.stdout
    assert "No text: there is no model 'absent'" in shown.stdout


def test_show_refuses_a_key_that_is_absent_or_not_unique(run, kept):
    assert isinstance(run("show", "0" * 64, "--tier", kept.address).exception, ConfigError)
    result = run("show", "", "--tier", kept.address)
    assert "3 keys begin with ''" in str(result.exception)


def test_show_does_not_print_a_damaged_object_as_if_it_were_sound(run, kept):
    kept.damage(2)
    result = run("show", kept.names[2], "--tier", kept.address)
    assert isinstance(result.exception, InvalidObject)
    assert "checksum" in str(result.exception)


def test_verify_passes_a_sound_tier(run, kept):
    result = run("verify", "--tier", kept.address)
    assert result.exit_code == 0
    assert "3 objects checked, 0 bad" in result.stdout


def test_verify_names_what_is_bad_and_why(run, kept):
    kept.damage(0)
    kept.file(1).write_bytes(kept.file(1).read_bytes()[:100])
    result = run("verify", "--tier", kept.address, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["checked"] == BLOCKS
    reasons = {row["name"]: row["problem"] for row in told["bad"]}
    assert set(reasons) == set(kept.names[:2])
    assert "checksum" in reasons[kept.names[0]]
    assert "ends inside its header" in reasons[kept.names[1]]
    assert all(kept.file(number).exists() for number in range(BLOCKS))


def test_verify_finds_two_objects_that_were_swapped(run, tmp_path):
    kept = keep(tmp_path / "kv")
    first, second = kept.file(0).read_bytes(), kept.file(1).read_bytes()
    kept.file(0).write_bytes(second)
    kept.file(1).write_bytes(first)
    result = run("verify", "--tier", kept.address, "--json")
    assert result.exit_code == 1
    assert {row["name"] for row in json.loads(result.stdout)["bad"]} == set(kept.names[:2])


def test_verify_removes_the_bad_when_asked_and_nothing_else(run, kept):
    kept.damage(1)
    assert run("verify", "--tier", kept.address, "--delete").exit_code == 1
    again = run("verify", "--tier", kept.address)
    assert again.exit_code == 0
    assert "2 objects checked" in again.stdout


def test_a30_clear_removes_what_it_says_and_counts_it_truly(run, kept):
    size = sum(kept.file(number).stat().st_size for number in range(BLOCKS))
    result = run("clear", "--tier", kept.address, "--yes", "--json")
    told = json.loads(result.stdout)
    assert (told["blocks"], told["objects"], told["bytes"], told["missed"]) == (BLOCKS, BLOCKS, size, [])
    assert {"tier": "disk", "objects": BLOCKS, "bytes": size} in told["tiers"]
    assert json.loads(run("ls", "--tier", kept.address, "--json").stdout) == []
    again = run("clear", "--tier", kept.address, "--yes", "--json")
    assert json.loads(again.stdout)["objects"] == 0


def test_clear_asks_first_and_takes_no_for_an_answer(run, kept):
    result = run("clear", "--tier", kept.address, input="n\n")
    assert result.exit_code == 1
    assert "Remove 3 objects" in result.stderr
    assert len(json.loads(run("ls", "--tier", kept.address, "--json").stdout)) == BLOCKS


def test_stats_sum_up_what_ls_lists(run, kept):
    told = json.loads(run("stats", "--tier", f"{kept.address}?capacity=1GiB", "--json").stdout)
    (row,) = told["rows"]
    sizes = [each["size_bytes"] for each in json.loads(run("ls", "--tier", kept.address, "--json").stdout)]
    assert (row["objects"], row["tokens"], row["spaces"], row["bytes"]) == (BLOCKS, 48, 1, sum(sizes))
    assert told["tiers"] == [{"tier": kept.address, "bytes": sum(sizes), "capacity": 1 << 30}]


@pytest.mark.parametrize("command", ["ls", "verify", "clear", "stats"])
def test_looking_at_a_tier_that_is_not_there_says_so_and_creates_nothing(run, tmp_path, command):
    result = run(command, "--tier", f"disk:{tmp_path / 'absent'}")
    assert isinstance(result.exception, ConfigError)
    assert "does not exist" in str(result.exception)
    assert not (tmp_path / "absent").exists()


def test_memory_tiers_have_nothing_to_look_at(run):
    assert "none of the tiers is a disk tier" in str(run("ls", "--tier", "memory:1GiB").exception)
