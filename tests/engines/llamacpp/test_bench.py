"""The bench of first tokens in llama.cpp, in small: it measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_every_way_to_the_first_token_is_there_and_answers_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retain.bench import llamacpp_ttft

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, count in (("PAIRS", 1), ("WARM", 2), ("RESTARTS", 1)):
        monkeypatch.setattr(llamacpp_ttft, name, count)
    report = llamacpp_ttft.run(300)
    assert report.passed
    assert [row["runs"] for row in report.rows] == [1, 1, 2, 1, 2]
    assert report.ratios["llamacpp.cold_over_memory"] > 1
    assert not list(tmp_path.iterdir())
