"""`retain status` shows what a daemon keeps, and whether the servers of its remote tiers are up."""

import json
import socket

from typer.testing import CliRunner

from retain.cache import Query
from retain.cli.app import app
from tests.blocks import block_at, chain_of, small_spec


def test_a21_a_remote_tier_that_is_down_is_shown_with_the_reason(connect):
    with socket.socket() as probe:  # a port that nobody listens on
        probe.bind(("127.0.0.1", 0))
        tiers = ("memory:8MiB", f"redis://127.0.0.1:{probe.getsockname()[1]}")
        cache = connect(*tiers)
        chain = chain_of(range(32))
        cache.store(block_at(small_spec(), chain, 0))
        for _ in range(4):
            cache.lookup(Query(chain, small_spec(), limit=32)).release()
            cache.flush(10)
        arguments = ["status", "--once", *(part for tier in tiers for part in ("--tier", tier))]
        shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "down: " in shown.stdout
        (state,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert state["health"]["redis"].startswith("down: ")
    assert [tier["objects"] for tier in state["tiers"]] == [1, 0]
    assert state["counters"]["lookups"] == 4


def test_without_remote_tiers_there_is_no_word_of_servers(connect):
    connect("memory:8MiB")
    shown = CliRunner().invoke(app, ["status", "--once", "--tier", "memory:8MiB"])
    assert shown.exit_code == 0
    assert "server" not in shown.stdout
