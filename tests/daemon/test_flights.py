"""Single flight across processes: one computes, the others wait, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from retain.cache import Query
from retain.engines.joining import join_flight
from tests.blocks import chain_of
from tests.cache.conformance import wait_for
from tests.cache.test_cache import SPEC, read
from tests.daemon.conftest import run_python

BLOCKS = 8

REQUEST = """
import json, sys, time
from retain.cache import Query
from retain.daemon import start
from retain.engines.joining import join_flight
from tests.blocks import *

cache = start.connect(TIERS)
spec, chain = small_spec(), chain_of(range(16 * BLOCKS))
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
flight = join_flight(cache, spec, chain, lambda: False)
computed = 0
for index in cache.missing(Query(chain, spec)):
    print("computing", flush=True)
    time.sleep(SECONDS)
    computed += cache.store(block_at(spec, chain, index)).reason == "stored"
if flight is not None:
    flight.land()
with cache.load(cache.lookup(Query(chain, spec))) as loaded:
    print(json.dumps([computed, loaded.tokens, time.monotonic() - began]), flush=True)
cache.close()
"""


def requests(tiers: list[str], count: int, seconds: float) -> list[subprocess.Popen[str]]:
    """Processes that are ready to ask for the same prompt, each block of which takes so long to compute."""
    program = REQUEST.replace("TIERS", repr(tiers)).replace("BLOCKS", str(BLOCKS))
    found = [run_python(program.replace("SECONDS", str(seconds))) for _ in range(count)]
    for each in found:
        assert each.stdout.readline().strip() == "ready"
    return found


def result(process: subprocess.Popen[str]) -> tuple[int, int, float]:
    output, _ = process.communicate(timeout=60)
    computed, tokens, seconds = json.loads(output.splitlines()[-1])
    return computed, tokens, seconds


def go(process: subprocess.Popen[str]) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_requests_of_several_processes_for_one_prefix_cause_one_prefill(connect, tmp_path: Path) -> None:
    tiers = ["memory:8MiB", f"disk:{tmp_path / 'kept'}"]
    cache = connect(*tiers)
    processes = requests(tiers, 5, 0.05)
    for each in processes:
        go(each)
    results = [result(each) for each in processes]
    assert sorted(computed for computed, _, _ in results) == [0, 0, 0, 0, BLOCKS]
    assert all(tokens == 16 * BLOCKS for _, tokens, _ in results)
    assert cache.stats().counters["stored_blocks"] == BLOCKS


def test_a_process_that_is_killed_while_it_computes_frees_those_who_wait(connect, tmp_path: Path) -> None:
    tiers = ["memory:8MiB", f"disk:{tmp_path / 'kept'}"]
    cache = connect(*tiers)
    leader, *followers = requests(tiers, 3, 0.3)
    go(leader)
    assert leader.stdout.readline().strip() == "computing"
    for each in followers:
        go(each)
    wait_for(lambda: cache.stats().counters["stored_blocks"] >= 2)
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    before = cache.stats().counters["stored_blocks"]
    wait_for(lambda: cache.stats().counters["stored_blocks"] > before, 2.0)
    results = [result(each) for each in followers]
    stored = cache.stats().counters["stored_blocks"]
    assert stored == BLOCKS, "what the dead one had stored is not computed again"
    assert min(computed for computed, _, _ in results) == 0
    assert all(tokens == 16 * BLOCKS for _, tokens, _ in results)
    leader.stdout.close(), leader.stdin.close()


def test_who_waits_for_one_that_hangs_waits_no_longer_than_computing_takes(connect, tmp_path: Path) -> None:
    tiers = ["memory:8MiB", f"disk:{tmp_path / 'kept'}"]
    cache, chain = connect(*tiers), chain_of(range(16 * BLOCKS))
    (leader,) = requests(tiers, 1, 0.3)
    go(leader)
    assert leader.stdout.readline().strip() == "computing"
    os.kill(leader.pid, signal.SIGSTOP)
    try:
        cache.planner.observe_prefill(SPEC, 0, 16 * BLOCKS, 0.5)
        began = time.monotonic()
        assert join_flight(cache, SPEC, chain, lambda: False) is None
        assert 0.3 < time.monotonic() - began < 2.5
        assert cache.missing(Query(chain, SPEC)) != []
        assert read(cache, chain)[0] < 16 * BLOCKS
    finally:
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        leader.stdout.close(), leader.stdin.close()
