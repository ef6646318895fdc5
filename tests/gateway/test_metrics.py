"""The page that Prometheus reads, over a real cache."""

from __future__ import annotations

import numpy as np
import pytest

from retain.block import array_shapes, block_of, make_header
from retain.cache import Cache, Query, Stats, open_cache
from retain.gateway.metrics import Meter
from retain.gateway.waiting import Line
from retain.identity import chain, space_of
from retain.model import LayerSpec, ModelSpec

SPEC = ModelSpec("toy", "toy", (LayerSpec("full", 1, 4, 4),), "float32", kin=b"k" * 32, variant=b"v" * 32)


def values(meter: Meter) -> dict[str, float]:
    pairs = [line.rpartition(" ") for line in meter.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def store(cache: Cache, tokens: list[int]) -> None:
    request = chain(space_of(SPEC.kin), tokens)
    for index in range(len(request.keys)):
        header = make_header(
            SPEC,
            space=request.space,
            parent=request.parent(index),
            tokens=request.block(index),
            first=index * 256,
        )
        arrays = {name: np.zeros(shape, np.float32) for name, shape in array_shapes(header).items()}
        assert cache.store(block_of(header, request.block(index), arrays)).kept


def look(cache: Cache, tokens: list[int]) -> int:
    with cache.lookup(Query(chain(space_of(SPEC.kin), tokens), SPEC)) as hit:
        return hit.tokens


def test_a14_the_counters_of_the_cache_move_by_what_happened() -> None:
    with open_cache("memory:1MiB") as cache:
        meter = Meter(Line(1), cache.stats)
        before = values(meter)
        assert values(meter) == before, "reading moves nothing"
        store(cache, [1] * 512)
        assert look(cache, [1] * 512) == 512
        assert look(cache, [1] * 256 + [2] * 256) == 256
        assert look(cache, [3] * 256) == 0
        moved = {name: value - before[name] for name, value in values(meter).items() if value != before[name]}
        bytes_stored = moved.pop("retain_cache_stored_bytes_total")
        assert moved.pop('retain_tier_resident_bytes{tier="memory"}') == bytes_stored > 0
        assert moved == {
            "retain_cache_stored_blocks_total": 2,
            'retain_tier_objects{tier="memory"}': 2,
            "retain_cache_lookups_total": 3,
            "retain_cache_lookup_hits_total": 2,
            "retain_cache_lookup_misses_total": 1,
            "retain_cache_requested_tokens_total": 1280,
            "retain_cache_hit_tokens_total": 768,
        }
        cache.clear()
        after = values(meter)
        assert after["retain_cache_dropped_objects_total"] == 2
        assert after['retain_tier_objects{tier="memory"}'] == 0
        assert after["retain_cache_stored_blocks_total"] == 2, "counters never fall"


def test_a13_a_counter_that_falls_in_the_cache_does_not_fall_on_the_page() -> None:
    told = Stats(counters={"lookups": 5}, failures={"broken": 2}, tiers={})
    meter = Meter(Line(1), lambda: told)
    assert values(meter)["retain_cache_lookups_total"] == 5
    told = Stats(counters={"lookups": 3}, failures={"broken": 1}, tiers={})
    assert values(meter)["retain_cache_lookups_total"] == 5
    assert values(meter)['retain_cache_failures_total{reason="broken"}'] == 2


def test_a13_the_last_statistics_stay_on_the_page_when_there_are_no_new_ones() -> None:
    broken = False

    def stats() -> Stats:
        if broken:
            raise RuntimeError("none today")
        return Stats(counters={"lookups": 5}, failures={}, tiers={})

    meter = Meter(Line(1), stats)
    values(meter)
    broken = True
    assert values(meter)["retain_cache_lookups_total"] == 5
    assert values(meter)["retain_stats_errors_total"] >= 1


def test_before_there_is_a_cache_the_page_shows_the_server_alone() -> None:
    page = values(Meter(Line(1), lambda: None))
    assert page["retain_queue_waiting"] == 0
    assert not any(name.startswith("retain_cache_lookups") for name in page)


@pytest.mark.parametrize(
    "ending", ["_total", "_seconds", "_bytes", "_objects", "_waiting", "_running", "_writes"]
)
def test_there_is_a_metric_of_each_kind(ending: str) -> None:
    with open_cache("memory:1MiB") as cache:
        page = Meter(Line(1), cache.stats).text().decode()
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert any(name.endswith(ending) for name in names)
