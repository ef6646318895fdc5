"""Tier addresses: what is read, what is refused, and that refusals name the offending part."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.address import (
    MAX_BYTES,
    Rules,
    TierAddress,
    format_size,
    parse_size,
    parse_tier,
    with_defaults,
)
from retain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1 kB", 1000),
        ("1.5KiB", 1536),
        ("17", 17),
        ("1B", 1),
        ("0", 0),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_a15_unit_strings_are_read_as_written(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "4 gigs", "1e9", "0x10", "nan", "4GiB extra", "1.0001KiB"]
)
def test_a15_what_is_no_size_is_refused_with_the_text(text):
    with pytest.raises(ConfigError, match=r"size|unit|whole number"):
        parse_size(text)


@pytest.mark.parametrize(("text", "hint"), [("4G", "4GiB"), ("4gb", "4GB"), ("4mib", "4MiB")])
def test_a15_a_sloppy_unit_is_refused_with_the_likely_ones(text, hint):
    with pytest.raises(ConfigError, match=f"did you mean .*{hint}"):
        parse_size(text)


@given(st.integers(0, MAX_BYTES))
def test_a_size_survives_being_written_and_read(size):
    assert parse_size(format_size(size)) == size


def test_addresses_of_both_kinds_are_read():
    assert parse_tier("memory:4GiB") == TierAddress("memory", capacity=4 << 30)
    assert parse_tier("disk:/kv") == TierAddress("disk", Path("/kv"))
    assert parse_tier("disk:~/kv?capacity=50GiB&codec=lossless") == TierAddress(
        "disk", Path.home() / "kv", 50 << 30, "lossless"
    )


@pytest.mark.parametrize(
    "text", ["memory:4GiB", "memory:0B", "disk:/kv", "disk:kv?capacity=1B&codec=lossless"]
)
def test_an_address_prints_as_it_is_read(text):
    assert str(parse_tier(text)) == text


@pytest.mark.parametrize(("capacity", "size"), [("0", 0), ("1B", 1), ("8388607TiB", 8388607 << 40)])
def test_a23_extreme_capacities_are_legal_and_kept_exactly(capacity, size):
    assert parse_tier(f"memory:{capacity}").capacity == size
    assert parse_tier(f"disk:/kv?capacity={capacity}").capacity == size


def test_a23_a_capacity_beyond_every_medium_is_refused():
    with pytest.raises(ConfigError, match="'9000PiB' is more than any store can hold"):
        parse_tier("disk:/kv?capacity=9000PiB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mem:4GiB", "did you mean memory"),
        ("memory", "lacks a size"),
        ("memory:", "lacks a size"),
        ("disk:", "lacks a folder"),
        ("disk:?capacity=1GiB", "lacks a folder"),
        ("disk:/kv?capcity=1GiB", "unknown option 'capcity'.*did you mean capacity"),
        ("disk:/kv?capacity=", "no value for the option 'capacity'"),
        ("disk:/kv?capacity", "no value for the option 'capacity'"),
        ("disk:/kv?capacity=1GiB&capacity=2GiB", "'capacity' twice"),
        ("disk:/kv?codec=losless", "codec 'losless'.*did you mean lossless"),
        ("memory:4GiB?codec=lossless", "unknown option 'codec'; a memory tier knows pins"),
        ("memory:4Gi", "'memory:4Gi' has a capacity that cannot be used"),
    ],
)
def test_a15_a_wrong_address_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_tier(text)


@given(
    st.builds(
        Rules,
        writes=st.sampled_from(["back", "through", "evicted"]),
        admit=st.sampled_from(["all", "reused"]),
        promote=st.booleans(),
        pins=st.none() | st.integers(0, 1 << 50),
        quotas=st.dictionaries(
            st.sampled_from(["alice", "a.b-c_d", "0"]) | st.just(""), st.integers(0, 1 << 60)
        ).map(lambda each: tuple(each.items())),
        ttls=st.dictionaries(
            st.sampled_from(["alice", "a.b-c_d", "0"]) | st.just(""),
            st.integers(1, 10**9).map(lambda ms: ms / 1000),
        ).map(lambda each: tuple(each.items())),
    )
)
def test_rules_are_read_back_from_their_address(rules):
    address = TierAddress("disk", Path("/kv"), 1 << 40, rules=rules)
    again = parse_tier(str(address))
    assert dict(again.rules.quotas) == dict(rules.quotas)
    assert dict(again.rules.ttls) == pytest.approx(dict(rules.ttls))
    plain = replace(rules, quotas=(), ttls=())
    assert replace(again.rules, quotas=(), ttls=()) == plain
    assert again.capacity == 1 << 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk:/kv?writes=later", "writes=later; write back or through or evicted"),
        ("disk:/kv?admit=none", "admit=none"),
        ("disk:/kv?quota.=1GiB", "the tenant ''"),
        ("disk:/kv?quota.a/b=1GiB", "the tenant 'a/b'"),
        ("disk:/kv?quota=much", "its quota 'much' is not a size"),
        ("disk:/kv?ttl=never", "its ttl 'never' is not a duration"),
        ("memory:1GiB?ahead=-1", "ahead=-1"),
        ("memory:1GiB?writes=back", "unknown option 'writes'"),
        ("redis://host?quota=1GiB", "unknown option 'quota'"),
        ("http://host/kv?capacity=1GiB", "only read"),
    ],
)
def test_a15_a_rule_that_makes_no_sense_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_tier(text)


def test_a_tiers_own_rules_beat_those_for_all_tiers():
    rules = Rules(quotas=(("", 5), ("alice", 7)), ttls=(("", 60.0),))
    given = with_defaults(parse_tier("disk:/kv?quota.alice=9B"), rules)
    assert given.rules.quota("alice") == 9
    assert given.rules.quota("bob") == 5
    assert given.rules.ttl("bob") == 60.0
    assert with_defaults(parse_tier("redis://host"), rules) == parse_tier("redis://host")
