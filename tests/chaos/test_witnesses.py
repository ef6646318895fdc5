"""The chaos bench notices what it is there to notice: wrong bytes, late answers, what is left behind."""

import http.client
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from retain.bench import chaos
from retain.bench.chaos import client
from retain.bench.chaos.clock import set_clock
from retain.bench.chaos.content import BLOCKS, SPEC, TOKENS, block, block_bytes, prompt, wrong
from retain.bench.chaos.crew import Seen
from retain.bench.chaos.footprint import footprint, leftovers, object_bytes
from retain.bench.chaos.proxy import Proxy
from retain.bench.chaos.run import Outcome
from retain.bench.report import tables
from retain.cache import Query, open_cache
from retain.errors import ConfigError
from retain.stores.disk import DiskStore


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_block_is_known_by_its_key_in_every_process():
    again = (
        "from retain.bench.chaos.content import *; print(bytes(block(prompt(3), 2).arrays['k']).hex()[:64])"
    )
    said = subprocess.run(
        [sys.executable, "-c", again], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert block(prompt(3), 2).arrays["k"].tobytes().hex()[:64] == said


def test_wrong_bytes_are_seen():
    with open_cache("memory:8MiB") as cache:
        for index in range(BLOCKS):
            assert cache.store(block(prompt(1), index)).kept
        with cache.load(cache.lookup(Query(prompt(1), SPEC))) as loaded:
            assert loaded.tokens == TOKENS
            assert wrong(prompt(1), loaded) is None
            assert "other tokens" in wrong(prompt(2), loaded)
            bent = loaded.blocks[4].arrays["v"].copy()
            bent.view("u4")[3, 1, 63, 31] ^= 1
            damaged = replace(loaded.blocks[4], arrays={**loaded.blocks[4].arrays, "v": bent})
            blocks = (*loaded.blocks[:4], damaged)
            spoiled = type(loaded)(blocks, loaded.lengths[:5], {}, 0.0, ())
            assert "block 4" in wrong(prompt(1), spoiled)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "DEADLINES", {"lookup": 0.1})
    monkeypatch.setattr(client, "SLACK_SECONDS", 0.05)
    path = tmp_path / "told"
    watch = client.Watch(str(path))

    def told():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [each for line in lines for each in line["late"]], [
            e for line in lines for e in line["raised"]
        ]

    return watch, told


def test_a_wait_past_its_deadline_is_told(watch):
    watch, told = watch
    assert watch.call("lookup", lambda: 5) == 5
    watch.call("lookup", lambda: time.sleep(1.5))
    wait_for(lambda: told()[0])
    time.sleep(0.3)
    assert len(told()[0]) == 1
    assert "lookup took 1.5" in told()[0][0]


def test_a_wait_that_never_ends_is_told_while_it_lasts(watch, monkeypatch):
    watch, told = watch
    ended = threading.Event()
    thread = threading.Thread(target=lambda: watch.call("lookup", lambda: ended.wait(20)))
    thread.start()
    try:
        wait_for(lambda: told()[0], 15)
    finally:
        ended.set()
        thread.join()
    time.sleep(0.3)
    assert len(told()[0]) == 1


def test_an_exception_is_told_and_no_answer(watch):
    watch, told = watch
    assert watch.call("lookup", lambda: 1 // 0) is None
    wait_for(lambda: told()[1])
    assert "ZeroDivisionError" in told()[1][0]


def test_open_files_zombies_and_unfinished_objects_are_seen(tmp_path):
    before = footprint(os.getpid())
    file = open(__file__)  # noqa: SIM115 - it is left open
    child = subprocess.Popen(["true"])
    wait_for(lambda: footprint(os.getpid()).zombies == before.zombies + 1)
    assert footprint(os.getpid()).files == before.files + 1
    child.wait()
    file.close()
    assert footprint(os.getpid()).files == before.files
    assert footprint(os.getpid()).zombies == before.zombies
    with closing(DiskStore(tmp_path / "kept")) as store:
        store.write("ab-object", [b"x" * 100])
        assert leftovers(tmp_path / "kept", 1) == []
        (tmp_path / "kept/.writing/99-0.abc").write_bytes(b"half")
        assert leftovers(tmp_path / "kept", 0) == [
            "1 unfinished objects in kept",
            "1 locks of 0 writers in kept",
        ]
        assert object_bytes(tmp_path / "kept") == 100


def outcome(fault, **seen):
    return Outcome(fault, 1, 1.0, Seen(Counter(lookups=1), {"lookup": 0.5, "load": 1.0}, **seen), (), True)


@pytest.mark.parametrize(
    ("given", "failed"),
    [
        ({}, set()),
        ({"wrong": ["bytes"]}, {"no_wrong_output"}),
        ({"late": ["a wait"]}, {"no_missed_deadline"}),
        ({"raised": ["an error"]}, {"no_exception"}),
    ],
)
def test_a_report_fails_by_what_was_seen(given, failed):
    fault = chaos.chosen(["disk: bit flips"])[0]
    report = chaos.report([outcome(fault, **given)])
    assert {name for name, passed in report.checks.items() if not passed} == failed
    assert report.rows[0]["worst_wait_seconds"] == 0.5, "nearer to its deadline than the load"
    assert report.ratios == {"wait_over_deadline.disk": 0.25}
    assert tables(report)
    left = Outcome(fault, 1, 1.0, Seen(), ["3 leases"], back=False)
    checks = chaos.report([left]).checks
    assert not checks["nothing_leaked"]
    assert not checks["works_again_afterwards"]


def test_faults_are_chosen_by_name():
    assert {fault.bed for fault in chaos.chosen(["redis:", "http: half"])} == {"redis", "http"}
    assert len({fault.title for fault in chaos.chosen([])}) == len(chaos.chosen([]))
    with pytest.raises(ConfigError, match=r"swapped objects.*") as error:
        chaos.chosen(["earthquake"])
    assert "earthquake" in str(error.value)


SERVER = """
import os, signal, sys
from pathlib import Path
from retain.bench.services import redis_server
with redis_server(Path(sys.argv[1])) as server:
    print(server.process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_server_does_not_outlive_a_killed_process_that_started_it(tmp_path):
    pytest.importorskip("redis")
    starter = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "redis")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = starter.stdout.readline()
    if not line:
        pytest.skip(starter.stderr.read().splitlines()[-1])
    assert footprint(int(line)) is not None
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    wait_for(lambda: footprint(int(line)) is None)


def test_a_program_under_a_clock_sees_it_jump(tmp_path):
    set_clock(tmp_path / "clock", 0.0)
    (tmp_path / "looks.py").write_text(
        "import sys, time\nfor _ in sys.stdin: print(time.time(), time.time_ns(), flush=True)\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-m", "retain.bench.chaos.clock", str(tmp_path / "clock"), "looks"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    for wrong_by in (0.0, 3600.0, -1e9):
        set_clock(tmp_path / "clock", wrong_by)
        program.stdin.write("\n")
        program.stdin.flush()
        seconds, nanoseconds = map(float, program.stdout.readline().split())
        assert seconds == pytest.approx(time.time() + wrong_by, abs=5)
        assert nanoseconds / 1e9 == pytest.approx(seconds, abs=1)
    program.communicate("")


@contextmanager
def served(body):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def asked(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with closing(connection):
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_proxy_spoils_the_way_as_it_is_told():
    body = bytes(200_000)
    with served(body) as port, Proxy(port) as proxy:
        assert asked(proxy.port) == (200, body)
        proxy.half = 5_000
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            asked(proxy.port)
        proxy.clear()
        proxy.status = 503
        assert asked(proxy.port)[0] == 503
        proxy.clear()
        proxy.rate = 400_000.0
        began = time.monotonic()
        assert asked(proxy.port) == (200, body)
        assert time.monotonic() - began > 0.4
        proxy.clear()
        proxy.refuse = True
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            asked(proxy.port)


def test_a_prompt_is_as_large_as_the_beds_reckon():
    assert 128 << 10 < block_bytes() < 136 << 10
