"""bench trace with codecs: smaller blocks, more of them in the same bytes, more hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from retain.bench import trace_codec
from retain.codecs.ladder import shelf
from retain.errors import ConfigError
from tests.engines.transformers.conftest import _one_thread  # noqa: F401
from tests.profile.conftest import cache_folder, learned  # noqa: F401

pytestmark = pytest.mark.engine


def test_the_same_bytes_hold_more_coded_blocks(cache_folder: Path) -> None:  # noqa: F811
    profile = learned("llama-gqa")
    shelf.keep(profile)
    trace = cache_folder / "trace.jsonl"
    # Ten prompts of four blocks, over and over: more than ten raw blocks hold, fewer than forty.
    rows = [
        {"input_length": 64, "hash_ids": [4 * n + b for b in range(4)], "block_size": 16} for n in range(10)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows * 5))
    report = trace_codec.run(str(trace), None, profile.kin, ["tiny"], [12])
    raw, tiny = report.rows
    assert tiny["capacity"] == int(12 * 16 / profile.declared["tiny"][1])
    assert report.ratios["trace.tiny.12.hit_rate"] > report.ratios["trace.raw.12.hit_rate"]
    assert raw["bits_per_value"] == 16
    assert trace_codec.plot(report).axes


def test_sizes_that_no_profile_tells_are_asked_for(cache_folder: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="retain profile MODEL"):
        trace_codec.bits_of(b"k" * 32, ["near"])
    profile = learned("llama-gqa")
    shelf.keep(profile)
    with pytest.raises(ConfigError, match="knows no 'nearer'"):
        trace_codec.bits_of(profile.kin, ["nearer"])
