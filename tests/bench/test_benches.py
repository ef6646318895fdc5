"""The benches themselves, on small sizes: every row and ratio is there, and nothing is left behind."""

import tempfile

import pytest

from retain.bench import demo, keys, store, texts, ttft
from retain.bench.demo import Answer
from retain.bench.server import ServerError, ServerProcess
from retain.errors import ConfigError

DEMO_CHECKS = {"text_equal", "memory_reused", "disk_reused", "nothing_reused_without_retain"}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The only folder where a bench may write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_store_measures_both_tiers_and_loading(temporary):
    report = store.run((64 << 10,), pool_bytes=1 << 20, rounds=2, ratio_size=64 << 10, prompts=4)
    ratios = {"store.memory.get", "store.memory.put", "store.disk.get", "store.disk.put", "store.cache.load"}
    assert set(report.ratios) == ratios
    assert all(ratio > 0 for ratio in report.ratios.values())
    whats = [row["what"] for row in report.rows]
    assert whats == [
        "memory put",
        "memory get",
        "disk put",
        "disk get",
        "cache.load from disk",
        "restart, page cache cold",
        "restart, page cache warm",
    ]
    assert report.passed
    assert list(temporary.iterdir()) == []
    pytest.importorskip("matplotlib")
    assert len(store.plot(report).axes[0].get_lines()) == 5


def test_keys_finds_the_whole_prompt_in_a_filled_index():
    report = keys.run(blocks=6_400, rounds=3)
    assert set(report.ratios) == {
        "keys.seconds_per_32k",
        "keys.over_sha256",
        "keys.index_bytes_per_block",
        "keys.lookup_seconds_per_32k",
    }
    assert report.checks["whole_prompt_found"]
    assert report.checks["index_within_200_bytes_a_block"]
    assert len(report.rows) == 4


def test_the_program_asked_about_is_the_first_of_the_right_length():
    found = texts.program(lambda source: len(source) // 4, 4_000, 6_000)
    assert 4_000 <= found.tokens <= 6_000
    assert found.source.startswith(('"""', "#", "import"))
    with pytest.raises(ConfigError, match="no program has 1 to 2 tokens; looked at textwrap"):
        texts.program(len, 1, 2)


def test_a_long_prompt_has_exactly_the_tokens_asked_for():
    assert len(texts.long_prompt(lambda text: list(text.encode()), 50_000)) == 50_000
    with pytest.raises(ConfigError, match="too few for 100"):
        texts.long_prompt(lambda text: [1], 100)


def answers(*texts_and_tiers: tuple[str, int, int]) -> list[Answer]:
    return [Answer(text, 1.0, 100, memory, disk) for text, memory, disk in texts_and_tiers]


PLAIN = (("a", 0, 0), ("b", 0, 0), ("c", 0, 0))
KEPT = (("a", 0, 0), ("b", 90, 0), ("c", 0, 80))


@pytest.mark.parametrize(
    ("kept", "plain", "failed"),
    [
        (KEPT, PLAIN, set()),
        ((*KEPT[:2], ("other", 0, 80)), PLAIN, {"text_equal"}),
        ((KEPT[0], ("b", 0, 0), KEPT[2]), PLAIN, {"memory_reused"}),
        ((*KEPT[:2], ("c", 80, 0)), PLAIN, {"disk_reused"}),
        (KEPT, (*PLAIN[:2], ("c", 16, 0)), {"nothing_reused_without_retain"}),
    ],
)
def test_the_demo_fails_when_an_answer_differs_or_nothing_was_reused(kept, plain, failed):
    report = demo.report(answers(*kept), answers(*plain))
    assert {name for name, passed in report.checks.items() if not passed} == failed
    assert set(report.checks) == DEMO_CHECKS
    assert [row["computed_tokens"] for row in report.rows] == [
        100 - memory - disk for _, memory, disk in kept
    ]


def test_a_server_that_cannot_start_says_why_and_leaves_no_process(tmp_path):
    pytest.importorskip("starlette")
    server = ServerProcess("no-such-model", [], tmp_path)
    with pytest.raises(ServerError, match="no-such-model"), server:
        pytest.fail("it started")
    assert server._process is None


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_ttft_measures_every_way_to_the_first_token(temporary, smollm2):
    report = ttft.run(300, ttft.Rounds(pairs=1, warm=1, restarts=1, cold_restarts=1, processes=1))
    assert report.checks == {
        "text_equal": True,
        "logits_close": True,
        "reused_from_memory": True,
        "reused_from_disk": True,
    }
    assert {"ttft.cold_over_memory", "ttft.cold_over_restart", "ttft.floor_over_memory"} <= set(report.ratios)
    assert {"ttft.miss_overhead", "ttft.miss_overhead_total"} <= set(report.ratios)
    assert len(report.rows) == 7
    assert list(temporary.iterdir()) == []


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_runs_on_a_short_program(temporary, monkeypatch, smollm2):
    pytest.importorskip("openai")
    pytest.importorskip("starlette")
    monkeypatch.setattr(demo, "PROGRAM_TOKENS", (800, 1_200))
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 12)
    said: list[str] = []
    report = demo.run(temporary, said.append)
    assert report.passed, report.checks
    assert [row["disk_tokens"] == 0 for row in report.rows] == [True, True, False]
    assert any("starting both again" in text for text in said)
