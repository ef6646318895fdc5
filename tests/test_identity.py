"""Identity: keys depend on content alone, and on all of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.identity import (
    Media,
    as_tokens,
    block_key,
    chain,
    content_key,
    digest,
    root_key,
    salt_of,
    space_of,
)

GOLDEN = Path(__file__).parent / "golden" / "keys.json"


def _bytes(text):
    return None if text is None else bytes.fromhex(text)


@pytest.mark.parametrize("row", json.loads(GOLDEN.read_text()))
def test_a1_keys_equal_the_golden_file_written_by_an_independent_program(row):
    given = row["given"]
    space = space_of(_bytes(given["kin"]), _bytes(given["adapter"]), _bytes(given["salt"]))
    assert space.hex() == row["space"]
    media = [Media(at, n, bytes.fromhex(value)) for at, n, value in given["media"]]
    size = given["block_tokens"]
    made = chain(space, given["tokens"], size, media)
    full = len(given["tokens"]) // size
    assert [key.hex() for key in made.keys] == row["keys"][:full]
    contents = [content_key(made.block(i), media, i * size).hex() for i in range(len(row["contents"]))]
    assert contents == row["contents"]
    if len(row["keys"]) > full:
        assert made.key(full, len(given["tokens"]) - full * size).hex() == row["keys"][full]


PROGRAM = """
import sys
from retain.identity import *
space = space_of(b"k" * 32, {adapter}, salt_of({tenant!r}, {salt!r}))
print(space.hex(), [key.hex() for key in chain(space, range(600)).keys])
"""


def _keys_in_a_fresh_process(tmp_path, hashseed, locale, **fields):
    import os

    environment = os.environ | {"PYTHONHASHSEED": hashseed, "LC_ALL": locale, "LANG": locale}
    where = tmp_path / hashseed
    where.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(**fields)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def test_a1_keys_are_equal_in_fresh_processes_under_other_hash_seeds_folders_and_locales(tmp_path):
    places = [
        ("0", "C"),
        ("1", "C.UTF-8"),
        ("4242", "de_DE.UTF-8"),
        ("random", "POSIX"),
        ("77", "tr_TR.UTF-8"),
    ]
    found = {
        _keys_in_a_fresh_process(tmp_path, seed, locale, adapter=None, tenant="alice", salt="s")
        for seed, locale in places
    }
    assert len(found) == 1


@pytest.mark.parametrize("adapter", [None, b"a" * 32])
@pytest.mark.parametrize("tenant", [None, "alice"])
@pytest.mark.parametrize("salt", [None, "s"])
def test_a2_two_processes_agree_with_every_optional_field_absent_or_present(tmp_path, adapter, tenant, salt):
    found = {
        _keys_in_a_fresh_process(tmp_path, seed, "C", adapter=adapter, tenant=tenant, salt=salt)
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a2_absent_and_empty_fields_give_different_spaces():
    kin = b"k" * 32
    spaces = [
        space_of(kin),
        space_of(kin, b""),
        space_of(kin, None, b""),
        space_of(kin, b"", b""),
        space_of(kin, salt_of("")),
        space_of(kin, salt_of("", None)),
        space_of(kin, salt_of(None, "")),
    ]
    assert len(set(spaces)) == 6  # salt_of("") and salt_of("", None) are one and the same


def test_a2_a_field_without_a_canonical_encoding_is_refused():
    for field in (object(), 1.5, True, {"a": 1}, {1}):
        with pytest.raises(TypeError, match="digest fields are"):
            digest("retain/1", field)


def test_a18_media_count_by_content_span_and_offset_and_leave_earlier_text_shared():
    space, tokens = space_of(b"k" * 32), np.arange(64)
    cat, dog = digest("image", b"cat"), digest("image", b"dog")

    def keys(*media):
        return chain(space, tokens, 16, media).keys

    plain, with_cat = keys(), keys(Media(20, 8, cat))
    assert plain[0] == with_cat[0], "the text before an image is shared"
    assert plain[1:] != with_cat[1:]
    variants = [
        with_cat,
        keys(Media(20, 8, dog)),
        keys(Media(20, 9, cat)),
        keys(Media(21, 8, cat)),
        keys(Media(20, 4, cat), Media(24, 4, dog)),
        keys(Media(20, 4, dog), Media(24, 4, cat)),
        keys(Media(20, 20, cat)),
    ]
    assert len({each[1] for each in variants}) == len(variants)
    assert keys(Media(24, 4, dog), Media(20, 4, cat)) == keys(Media(20, 4, cat), Media(24, 4, dog)), (
        "order of mention is nothing"
    )
    long = keys(Media(10, 40, cat))
    assert long[0] != plain[0], "every block that an image touches carries it"
    assert long[1] != with_cat[1]


def test_a19_another_adapter_gives_other_keys():
    kin, tokens = b"k" * 32, range(256)
    found = {chain(space_of(kin, adapter), tokens).keys for adapter in (None, b"a" * 32, b"b" * 32)}
    assert len(found) == 3


def test_a20_the_same_prompt_of_two_tenants_shares_no_key():
    kin, tokens = b"k" * 32, range(2560)
    salts = [
        salt_of(None),
        salt_of("alice"),
        salt_of("bob"),
        salt_of("alice", "x"),
        salt_of(None, "x"),
        salt_of("bob", "x"),
    ]
    chains = [set(chain(space_of(kin, None, salt), tokens).keys) for salt in salts]
    assert sum(len(each) for each in chains) == len(set().union(*chains))


tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(tokens_lists, tokens_lists)
def test_equal_keys_mean_equal_prefixes(a, b):
    space = space_of(b"k" * 32)
    one, two = chain(space, a, 16), chain(space, b, 16)
    for index in range(min(len(one.keys), len(two.keys))):
        assert (one.keys[index] == two.keys[index]) == (a[: (index + 1) * 16] == b[: (index + 1) * 16])


@given(tokens_lists)
def test_the_fast_loop_gives_the_keys_of_the_definition(tokens):
    space = space_of(b"k" * 32)
    made = chain(space, tokens, 16)
    parent = root_key(space)
    for index in range(len(tokens) // 16):
        assert made.parent(index) == parent
        parent = block_key(parent, as_tokens(tokens[index * 16 : index * 16 + 16]))
        assert made.keys[index] == parent


@given(
    st.lists(
        st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.binary(max_size=3)), max_size=4
    ),
    st.lists(
        st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.binary(max_size=3)), max_size=4
    ),
)
def test_different_fields_never_share_a_digest(a, b):
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (digest("d", *a) == digest("d", *b)) == same
    assert digest("d", a) != digest("d", *a) or len(a) == 0 == len(b)


def test_token_ids_that_do_not_fit_are_refused():
    for bad in ([-1], [2**32], [1.5], [[1, 2]]):
        with pytest.raises(ValueError, match="token ids"):
            as_tokens(bad)
    assert as_tokens([]).size == 0
