"""Reports: one JSON object, tables a person can read, charts, and numbers with their units."""

import json

import pytest
from rich.console import Console

from retain.bench.clock import Contender, Sample, interleaved, medians, timed
from retain.bench.report import Report, cell, new_figure, save_figure, tables, this_machine

REPORT = Report(
    "made",
    [{"what": "a", "load_seconds": 0.0123, "object_bytes": 4 << 20}, {"what": "b", "hit_rate": 0.21921}],
    {"made.ratio": 2.5},
    {"text_equal": True},
)


def test_the_json_has_exactly_the_five_parts():
    told = json.loads(REPORT.json())
    assert list(told) == ["name", "machine", "rows", "ratios", "checks"]
    assert told["rows"][0] == {"what": "a", "load_seconds": 0.0123, "object_bytes": 4194304}
    assert told["ratios"] == {"made.ratio": 2.5}
    assert told["checks"] == {"text_equal": True}
    assert set(told["machine"]) == {"cpu", "cores", "memory_bytes", "system", "python"}


def test_one_failed_check_fails_the_report():
    assert REPORT.passed
    assert not Report("made", [], {}, {"good": True, "bad": False}).passed


def test_the_tables_show_every_row_ratio_and_check():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    for table in tables(REPORT):
        console.print(table)
    text = console.export_text()
    for expected in ("12.30 ms", "4.00 MiB", "0.2192", "made.ratio", "2.5", "text_equal", "yes", "-"):
        assert expected in text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("a_seconds", 2.0, "2.00 s"),
        ("a_seconds", 2e-6, "2.00 µs"),
        ("a_bytes", 17, "17 B"),
        ("a_bytes", 5 << 40, "5.00 TiB"),
        ("bytes_per_second", 1 << 30, "1.00 GiB/s"),
        ("tokens_per_second", 1234.5, "1,234/s"),
        ("count", 12345, "12,345"),
        ("ratio", 0.98765, "0.988"),
        ("good", True, "yes"),
        ("nothing", None, "-"),
    ],
)
def test_a_value_is_shown_by_its_unit(key, value, text):
    assert cell(key, value) == text


def test_the_machine_is_this_one():
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.cpu


def test_a_chart_is_written_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    figure, axes = new_figure()
    axes.plot([1, 2], [3, 4])
    save_figure(figure, tmp_path / "deep" / "chart.png")
    assert (tmp_path / "deep" / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_contenders_take_turns_at_being_first_and_preparation_is_not_timed():
    order: list[str] = []
    ready: list[int] = []
    contenders = {
        "a": Contender(lambda turn: order.append("a"), ready.append),
        "b": Contender(lambda turn: order.append("b")),
    }
    found = interleaved(contenders, rounds=3, warmups=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert ready == [0, 1, 2, 3]
    assert set(found) == {"a", "b"}


def test_cpu_seconds_count_work_and_not_waiting():
    import time

    def spin() -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass

    assert timed(spin).cpu_seconds >= 0.05
    asleep = timed(lambda: time.sleep(0.05))
    assert asleep.seconds >= 0.05
    assert asleep.cpu_seconds < 0.04


def test_medians_are_taken_apart():
    assert medians([Sample(1, 30), Sample(2, 10), Sample(9, 20)]) == Sample(2, 20)
