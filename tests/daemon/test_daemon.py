"""The daemon outlives its clients, is met again after its end, and never causes a hang or wrong bytes."""

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from retain.bench.chaos.footprint import footprint
from retain.block import cut
from retain.cache import Query
from retain.codecs import codec
from retain.daemon import messages, server, start, wire
from retain.daemon.client import RemoteCache
from retain.errors import StoreUnavailable
from retain.model import Slice
from tests.blocks import block_at, chain_of, small_spec
from tests.cache.test_cache import SPEC, fill, read, same
from tests.daemon.conftest import pids, run_python
from tests.stores.servers import Proxy, redis_server


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def leased(cache):
    return sum(tier.leased for tier in cache.stats().tiers.values())


def test_what_one_process_stored_another_finds(connect):
    writer, chain = connect(), chain_of(range(64))
    blocks = fill(writer, chain)
    writer.close()
    reader = connect()
    hit = reader.lookup(Query(chain, SPEC))
    assert hit.tokens_by_tier == {"memory": 64}
    with reader.load(hit) as loaded:
        assert same([dict(b.arrays) for b in loaded.blocks], blocks)
        with pytest.raises(ValueError, match="read-only"):
            loaded.blocks[0].arrays["k"][:] = 0
    wait_for(lambda: leased(reader) == 0)


def test_a_growing_prompt_sends_only_what_is_new(connect, monkeypatch):
    cache = connect()
    sent = []
    original = wire.send_request
    monkeypatch.setattr(wire, "send_request", lambda c, r: (sent.append(r), original(c, r)))
    tokens = [*range(160)]
    fill(cache, chain_of(tokens))
    for length in (160, 176, 192, 100):
        cache.lookup(Query(chain_of(range(length)), SPEC)).release()
    looked = [len(r.keys) // 32 for r in sent if isinstance(r, messages.Lookup)]
    assert looked == [10, 1, 1, 0]
    for other in range(100):  # the daemon forgets the first chain meanwhile
        cache.lookup(Query(chain_of([other + 1000] * 16), SPEC)).release()
    assert read(cache, chain_of(range(192)))[0] == 160


CLAIM = """
import sys
from retain.daemon import start
from tests.blocks import *
cache = start.connect(sys.argv[1:])
spec = small_spec(layers=4, heads=4)
hit = cache.claim(bytes.fromhex(sys.stdin.readline()), spec, Slice(0, 4, 1, 2, 2))
with cache.load(hit) as loaded:
    print(loaded.tokens, loaded.blocks[0].arrays["k"].tobytes().hex() if loaded.blocks else "", flush=True)
cache.close()
"""


def test_a_hit_looked_up_here_is_loaded_by_another_process_in_its_own_slice(connect, tmp_path):
    cache, spec, chain = connect(), small_spec(layers=4, heads=4), chain_of(range(32))
    blocks = fill(cache, chain, spec)
    hit = cache.lookup(Query(chain, spec))
    tiers = ["memory:8MiB", f"disk:{tmp_path / 'kept'}"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", CLAIM, *tiers], cwd=root, text=True, input=hit.ticket().hex() + "\n",
            capture_output=True, check=True,
        )  # fmt: skip
        tokens, numbers = run.stdout.split()
        assert tokens == "32"
        assert bytes.fromhex(numbers) == cut(blocks[0], Slice(0, 4, 1, 2, 2)).arrays["k"].tobytes()
    hit.release()
    wait_for(lambda: leased(cache) == 0)
    late = cache.claim(hit.ticket(), spec)
    assert cache.load(late).tokens == 0
    with pytest.raises(ValueError, match="ticket"):
        cache.claim(b"nonsense", spec)


def test_a_daemon_that_dies_and_returns_is_missed_and_met_again(connect, runtime):
    cache, chain = connect(), chain_of(range(64))
    blocks = fill(cache, chain)
    assert cache.flush()
    loaded = cache.load(cache.lookup(Query(chain, SPEC)))
    (pid,) = pids(runtime)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert cache.lookup(Query(chain, SPEC)).tokens == 0
    assert cache.store(block_at(SPEC, chain_of(range(500, 516)))).kept is False
    assert time.monotonic() - began < 1
    assert same([dict(b.arrays) for b in loaded.blocks], blocks), "what was loaded stays readable"
    loaded.close()
    wait_for(lambda: cache.connected)
    assert cache.state().pid != pid
    hit = cache.lookup(Query(chain, SPEC))
    assert hit.tokens_by_tier == {"disk": 64}
    with cache.load(hit) as again:
        assert same([dict(b.arrays) for b in again.blocks], blocks)


def test_a_hit_of_the_old_daemon_loads_nothing_from_the_new_one(connect, runtime):
    cache, chain = connect(), chain_of(range(64))
    fill(cache, chain)
    cache.flush()
    hits = [cache.lookup(Query(chain, SPEC)) for _ in range(3)]
    place = cache.reserve(block_at(SPEC, chain_of(range(900, 916))).header)
    os.kill(pids(runtime)[0], signal.SIGKILL)
    cache.lookup(Query(chain, SPEC))
    wait_for(lambda: cache.connected)
    assert place.commit().kept is False
    for hit in hits:
        with cache.load(hit) as loaded:
            assert loaded.tokens in (0, 64)
            assert same(
                [dict(b.arrays) for b in loaded.blocks],
                [block_at(SPEC, chain, i) for i in range(len(loaded.blocks))],
            )


def test_a_daemon_that_hangs_costs_one_deadline_and_then_nothing(connect, runtime, monkeypatch):
    monkeypatch.setattr("retain.daemon.link.CALL_SECONDS", 0.5)
    cache, chain = connect(), chain_of(range(64))
    fill(cache, chain)
    (pid,) = pids(runtime)
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert cache.lookup(Query(chain, SPEC)).tokens == 0
        assert time.monotonic() - began < 2
        began = time.monotonic()
        assert cache.lookup(Query(chain, SPEC)).tokens == 0
        assert cache.nearest(chain) is None
        assert time.monotonic() - began < 0.2
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: cache.connected)
    assert read(cache, chain)[0] == 64


RACE = """
import sys
from retain.daemon import start
cache = start.connect(sys.argv[1:])
print(cache.state().pid, flush=True)
sys.stdin.readline()
cache.close()
"""


def test_raced_starts_settle_on_one_daemon(runtime, tmp_path):
    tiers = ["memory:1MiB", f"disk:{tmp_path / 'kept'}"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, *tiers],
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    found = {racer.stdout.readline().strip() for racer in racers}
    for racer in racers:
        racer.communicate("\n")
    assert len(found) == 1
    wait_for(lambda: len(pids(runtime)) == 1)


def test_of_many_who_miss_the_daemon_one_starts_it(connect, runtime, monkeypatch):
    clients = [connect() for _ in range(4)]
    started = []
    original = start.spawn
    monkeypatch.setattr(start, "spawn", lambda *given: (started.append(1), original(*given)))
    os.kill(clients[0].state().pid, signal.SIGKILL)
    for client in clients:
        wait_for(lambda client=client: client.state() is not None)
    assert len(started) == 1


HOLD = """
import sys
from retain.daemon import start
from retain.cache import Query
from tests.blocks import *
cache = start.connect(sys.argv[1:])
chain = chain_of(range(64))
loaded = cache.load(cache.lookup(Query(chain, small_spec())))
place = cache.reserve(block_at(small_spec(), chain_of(range(900, 916))).header)
flight = cache.flight(b"f" * 32, 1)
print(loaded.tokens, flight.leader, flush=True)
sys.stdin.readline()
if sys.argv[-1] == "leave":
    for link in [cache._link]:
        link.close()
    print("left", flush=True)
    sys.stdin.readline()
"""


def test_a6_the_leases_of_a_killed_client_end_with_it(connect, runtime, tmp_path):
    cache, chain = connect(), chain_of(range(64))
    fill(cache, chain)
    holder = run_python(HOLD.replace("sys.argv[1:]", repr(["memory:8MiB", f"disk:{tmp_path / 'kept'}"])))
    assert holder.stdout.readline().split() == ["64", "True"]
    assert leased(cache) == 4
    follower = threading.Thread(target=lambda: cache.flight(b"f" * 32, 20))
    follower.start()
    holder.kill()
    holder.wait()
    follower.join(5)
    assert not follower.is_alive(), "a dead leader keeps nobody waiting"
    wait_for(lambda: leased(cache) == 0)
    assert cache.store(block_at(SPEC, chain_of(range(900, 916)))).reason == "stored", (
        "its reservation is gone too"
    )
    holder.stdout.close(), holder.stdin.close()


def test_what_a_client_that_left_without_a_word_had_in_use_waits_for_its_process_to_end(connect, tmp_path):
    cache, chain = connect(), chain_of(range(64))
    fill(cache, chain)
    program = HOLD.replace("sys.argv[1:]", repr(["memory:8MiB", f"disk:{tmp_path / 'kept'}"]))
    holder = run_python(program.replace("sys.argv[-1]", "'leave'"))
    assert holder.stdout.readline().split() == ["64", "True"]
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline().strip() == "left"
    time.sleep(1.5)
    assert leased(cache) == 4, "it may still be copying"
    holder.kill()
    holder.wait()
    wait_for(lambda: leased(cache) == 0)
    holder.stdout.close(), holder.stdin.close()


def test_what_a_client_wrote_is_verified_before_anyone_sees_it(connect):
    cache, block = connect(), block_at(SPEC, chain_of(range(16)))
    place = cache.reserve(block.header)
    place.fill(block)
    link = cache._link
    raw = memoryview(b"".join(block.encode(codec("raw"))))
    # A client that dies half way, or lies: a whole header over numbers that are not there.
    offset = next(
        at for at in range(0, link.readable.nbytes, 4096)
        if link.readable[at + len(raw) - 64 : at + len(raw)] == raw[-64:]
    )  # fmt: skip
    link.writable[offset : offset + len(raw)] = raw
    link.writable[offset + len(raw) - 1] ^= 1
    reply = link.call(messages.Commit(block.header.name), 5)
    assert reply == messages.Kept(False, "failed")
    assert read(cache, chain_of(range(16)))[0] == 0
    assert any("not intact" in reason for reason in cache.stats().failures)


def dial(runtime):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(next(runtime.glob("*.sock"))))
    return connection


def test_an_unknown_protocol_version_is_refused_with_both_named(connect, runtime):
    connect()
    with dial(runtime) as connection:
        wire.send_request(connection, messages.Hello(99, "future", b""))
        _, reply, _ = wire.receive_reply(connection, time.monotonic() + 5)
    assert isinstance(reply, messages.Refused)
    assert "version 2" in reply.reason
    assert "version 99" in reply.reason


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0" * 3,
        b"\0" * 64,
        struct.pack("<I", 2**32 - 1) + b"x" * 100,
        struct.pack("<I", 5) + b"\x93\xa5",
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 3000) + b"\x91" * 3000,
        b"GET / HTTP/1.1\r\n\r\n" * 10,
    ],
)
def test_a21_garbage_on_the_socket_harms_nobody(connect, runtime, garbage):
    cache = connect()
    with dial(runtime) as connection:
        connection.sendall(garbage)
        with suppress(ConnectionResetError):
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    chain = chain_of(range(16))
    blocks = fill(cache, chain)
    assert same(read(cache, chain)[1], blocks)


def test_requests_that_make_no_sense_are_refused_one_by_one(connect, runtime):
    cache = connect()
    link = cache._link
    nonsense = [
        messages.Lookup(99, 1, 0, 0, b"", b"r" * 32, 16, "l0-2_h0-1of1", "exact", 16),
        messages.Lookup(1, 1, 0, 5, b"", b"r" * 32, 16, "l0-2_h0-1of1", "exact", 16),
        messages.Lookup(1, 1, 0, 0, b"x" * 31, b"r" * 32, 16, "l0-2_h0-1of1", "exact", 16),
        messages.Load(12345, 1, 1.0, True),
        messages.Reserve("../../etc/passwd", 100),
        messages.Reserve("x" * 1000, 100),
        messages.Reserve(block_at(SPEC, chain_of(range(16))).header.name, 1 << 60),
        messages.Commit("nobody reserved this"),
        messages.Model(
            1,
            messages.ModelWire("m", "a", '[[1000000000,"full",1,1,1,null,null]]', "float32", b"", b"", None),
        ),
    ]
    for request in nonsense:
        reply = link.call(request, 5)
        assert (
            isinstance(reply, messages.Refused)
            or reply == messages.Kept(False, "failed")
            or reply.offset == -1
        ), request
    assert read(cache, chain_of(range(16)))[0] == 0
    assert cache.connected


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_turned_away(connect, runtime):
    connect()
    sock = next(runtime.glob("*.sock"))
    for path in (sock, sock.parent, sock.parent.parent):
        os.chmod(path, 0o777)  # noqa: S103 - the daemon's own check shall turn it away
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with dial(runtime) as connection:
                wire.send_request(connection, messages.Hello(messages.VERSION, "nobody", b""))
                _, reply, _ = wire.receive_reply(connection, time.monotonic() + 5)
            os._exit(0 if isinstance(reply, messages.Refused) and "user" in reply.reason else 1)
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_sockets_and_folders_are_the_owners_alone(connect, runtime):
    connect()
    assert (runtime.stat().st_mode & 0o777) == 0o700
    assert (next(runtime.glob("*.sock")).stat().st_mode & 0o077) == 0


def test_an_idle_daemon_ends_and_its_tiers_persist(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "IDLE_SECONDS", 0.5)
    tiers = ("memory:8MiB", f"disk:{tmp_path / 'kept'}")
    chain = chain_of(range(64))
    with start.connect(tiers) as cache:
        fill(cache, chain)
        time.sleep(2.5)
        assert len(pids(runtime)) == 1, "a daemon with a client is not idle"
    wait_for(lambda: not pids(runtime))
    with pytest.raises(StoreUnavailable):
        start.connect(tiers, start=False)
    with start.connect(tiers) as cache:
        assert cache.lookup(Query(chain, SPEC)).tokens_by_tier == {"disk": 64}


def test_a_runtime_folder_with_a_long_path_serves_too(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with start.connect(["memory:1MiB"]) as cache:
        fill(cache, chain_of(range(16)))
        assert len(pids(folder)) == 1
        assert cache.stop_daemon()
    wait_for(lambda: not pids(folder))


def test_clients_of_other_configurations_have_daemons_of_their_own(connect, runtime):
    one, two = connect("memory:1MiB"), connect("memory:2MiB")
    assert one.state().pid != two.state().pid
    assert one.stop_daemon()
    wait_for(lambda: len(pids(runtime)) == 1)
    assert two.state() is not None


def test_metrics_and_health_are_served_when_asked_for(runtime, tmp_path):
    sock = tmp_path / "d.sock"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runtime.mkdir()
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "retain.daemon",
            "--socket",
            str(sock),
            "--tier",
            "memory:1MiB",
            "--http",
            str(port),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(sock.exists)
        cache = RemoteCache(lambda: start.reach(sock))
        fill(cache, chain_of(range(16)))
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        assert "\nretain_stored_blocks_total 1\n" in text
        assert 'retain_tier_objects{tier="memory"} 1\n' in text
        health = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5))
        assert health["status"] == "ok"
        cache.close()
    finally:
        daemon.terminate()
        assert daemon.wait(10) == 0
    assert not sock.exists()


def test_many_clients_over_a_small_arena_never_read_wrong_bytes(connect, tmp_path):
    spec = small_spec(layers=4, heads=4, dim=16)
    chains = [chain_of(range(1000 * i, 1000 * i + 64)) for i in range(12)]
    size = -(-sum(len(chunk) for chunk in block_at(spec, chains[0]).encode(codec("raw"))) // 4096) * 4096
    tiers = (f"memory:{size * 14}", f"disk:{tmp_path / 'small'}?capacity={size * 20}")
    clients = [connect(*tiers) for _ in range(4)]
    errors = []

    def work(seed):
        cache, rng = clients[seed], np.random.default_rng(seed)
        try:
            for _ in range(40):
                chain = chains[rng.integers(len(chains))]
                tokens, got = read(cache, chain, spec)
                expected = [block_at(spec, chain, i) for i in range(4)]
                assert same(got, expected[: tokens // 16])
                for block in expected:
                    cache.store(block)
                if rng.random() < 0.05:
                    cache.clear(space=chain.space)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert clients[0].flush(20)
    wait_for(lambda: leased(clients[0]) == 0)
    stats = clients[0].stats()
    assert stats.tiers["disk"].bytes <= size * 20
    assert set(stats.failures) <= {"a block could not be shared", "a load from the daemon failed"}, (
        stats.failures
    )


def test_no_descriptor_is_left_open_by_clients_that_come_and_go(connect, runtime):
    first = connect()
    (pid,) = pids(runtime)

    def count():
        return len(os.listdir(f"/proc/{pid}/fd"))

    def own():
        return len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        with connect() as client:
            client.state()
    before, mine = count(), own()
    for _ in range(30):
        with connect() as client:
            read(client, chain_of(range(16)))
    wait_for(lambda: count() <= before)
    assert own() <= mine
    wait_for(lambda: first.state().sessions == 1)


def test_a_daemon_that_was_killed_is_no_zombie_of_who_started_it(connect, runtime):
    cache = connect()
    for _ in range(2):
        os.kill(cache.state().pid, signal.SIGKILL)
        wait_for(lambda: cache.state() is not None)
    wait_for(lambda: footprint(os.getpid()).zombies == 0)


SLOW_START = """
import sys, time
import retain.daemon.__main__ as program
opened = program.open_cache
program.open_cache = lambda *given, **named: (time.sleep(3), opened(*given, **named))[1]
sys.exit(program.main(sys.argv[1:]))
"""


def test_a_daemon_that_takes_long_to_open_its_tiers_is_waited_for(runtime, tmp_path, monkeypatch):
    program = tmp_path / "slow.py"
    program.write_text(SLOW_START)
    original = subprocess.Popen

    def popen(arguments, **named):
        at = arguments.index("-m")
        return original([*arguments[:at], str(program), *arguments[at + 2 :]], **named)

    monkeypatch.setattr(start.subprocess, "Popen", popen)
    with start.connect(["memory:1MiB"]) as cache:
        assert cache.state() is not None
        cache.stop_daemon()


def test_a_store_that_waits_for_room_is_answered_within_its_deadline(connect, tmp_path):
    spec = small_spec(layers=4, heads=4, dim=16)
    blocks = [block_at(spec, chain_of(range(1000 * i, 1000 * i + 16))) for i in range(2)]
    size = -(-sum(len(chunk) for chunk in blocks[0].encode(codec("raw"))) // 4096) * 4096
    with redis_server(tmp_path / "redis") as server, Proxy(server.port) as proxy:
        cache = connect(f"memory:{size}", f"redis://127.0.0.1:{proxy.port}?wait=6s")
        wait_for(lambda: cache.state().health == {"redis": "up"})
        proxy.silent = True
        assert cache.store(blocks[0]).kept
        began = time.monotonic()
        assert cache.store(blocks[1]).reason == "no room", "the first is still on its way to the server"
        assert 0.9 < time.monotonic() - began < 1.9
        assert cache.connected


def test_what_a_client_used_over_a_link_that_broke_is_free_once_it_lets_go(connect, runtime, monkeypatch):
    monkeypatch.setattr("retain.daemon.link.CALL_SECONDS", 1.0)
    cache, chain = connect(), chain_of(range(64))
    blocks = fill(cache, chain)
    loaded = cache.load(cache.lookup(Query(chain, SPEC)))
    place = cache.reserve(block_at(SPEC, chain_of(range(900, 916))).header)
    (pid,) = pids(runtime)
    os.kill(pid, signal.SIGSTOP)
    assert cache.lookup(Query(chain, SPEC)).tokens == 0
    assert not cache.connected
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: cache.connected)
    time.sleep(1.5)
    assert leased(cache) == 4, "it may still be copying"
    assert cache.stats().temporary_bytes > 0
    assert same([dict(b.arrays) for b in loaded.blocks], blocks)
    loaded.close()
    place.abandon()
    wait_for(lambda: leased(cache) == 0 and cache.stats().temporary_bytes == 0)


def test_a_daemon_out_of_descriptors_lets_clients_in_once_it_has_some(connect, runtime):
    cache = connect()
    pid = cache.state().pid
    few = len(os.listdir(f"/proc/{pid}/fd")) + 2
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    dialled = [dial(runtime) for _ in range(6)]
    wait_for(lambda: "a client could not be let in" in cache.stats().failures)
    for each in dialled:
        each.close()
    with connect() as other:
        assert read(other, chain_of(range(16)))[0] == 0
    assert cache.state().pid == pid


def test_a_load_waits_for_the_word_that_settles_its_lookup(connect, tmp_path):
    chain = chain_of([*range(32), *range(900, 940)], 32)
    looker, loader = connect(), connect()
    for end in (24, 16):  # two kept blocks that begin as the prompt does
        looker.store(block_at(SPEC, chain_of([*range(32), *range(900, 900 + end)], 32), 0))
        looker.store(block_at(SPEC, chain_of([*range(32), *range(900, 900 + end)], 32), 1))
    call = looker._link.call

    def late(request, timeout):
        if isinstance(request, messages.Settle):
            threading.Timer(0.2, call, (request, timeout)).start()
            return None
        return call(request, timeout)

    looker._link.call = late
    for _ in range(3):
        hit = looker.lookup(Query(chain, SPEC, limit=60), plan=False)
        assert hit.tokens == 56
        with loader.load(loader.claim(hit.ticket(), SPEC)) as loaded:
            assert loaded.tokens == 56
        hit.release()
    assert not loader.stats().failures


def test_a_daemon_that_was_started_on_demand_is_no_child_of_who_started_it(connect):
    state = connect().state()
    status = Path(f"/proc/{state.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(status[1]) != os.getpid()
    parent = Path(f"/proc/{status[1]}/cmdline").read_bytes()
    assert b"pytest" not in parent


def test_the_death_of_a_client_is_noticed_by_a_descriptor_of_any_number():
    most, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, 2048), hardest))
    child = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(child.pid)
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD, 1500)  # select takes none over 1,023
    try:
        assert not server.ended(high)
        child.kill()
        wait_for(lambda: server.ended(high))
    finally:
        child.kill()
        child.wait()
        os.close(pidfd), os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hardest))
