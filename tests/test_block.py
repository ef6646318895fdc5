"""Blocks: what is kept comes back bit for bit, or not at all."""

import itertools
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from retain.block import Expected, assemble, cut, decode, raw_layout, verify_object
from retain.codecs import CODECS, codec
from retain.codecs.base import container
from retain.errors import InvalidObject
from retain.header import FORMAT, object_name, parse_frame, split_name
from retain.identity import Media, chain, space_of
from retain.model import DTYPES, LayerSpec, ModelSpec, RopeSpec, Slice

from .blocks import block_at, chain_of, mixed_spec, small_spec

EXACT = [name for name, each in CODECS.items() if not each.lossy]


def encoded(block, name="raw"):
    return memoryview(bytearray(b"".join(block.encode(codec(name)))))


def same_numbers(a, b):
    return a.arrays.keys() == b.arrays.keys() and all(
        a.arrays[n].tobytes() == b.arrays[n].tobytes() and a.arrays[n].shape == b.arrays[n].shape
        for n in a.arrays
    )


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [small_spec, mixed_spec])
def test_a_block_survives_encoding_bit_for_bit(name, dtype, make):
    spec = make(dtype)
    block = block_at(spec, chain_of(range(64)), 1)
    got = decode(encoded(block, name), Expected(block.header.key, spec))
    assert same_numbers(got, block)
    assert got.header == block.header
    assert got.tokens.tolist() == list(range(16, 32))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_payloads_infinities_and_zeros_of_both_signs_survive(name, dtype):
    spec = small_spec(dtype)
    block = block_at(spec, chain_of(range(16)))
    width = container(dtype).itemsize
    patterns = np.random.default_rng(1).integers(0, 1 << 8 * width, 64, dtype=np.uint64).astype(f"u{width}")
    special = {
        "float32": [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0, 0x80000000, 1],
        "float16": [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0, 0x8000, 1],
        "bfloat16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0, 0x8000, 1],
    }[dtype]
    flat = block.arrays["k"].reshape(-1).view(f"u{width}")
    flat[:8], flat[8:72] = special, patterns
    assert same_numbers(decode(encoded(block, name)), block)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(EXACT),
    st.binary(max_size=300),
)
def test_any_geometry_and_any_bits_survive(count, layers, heads, dim, dtype, name, bits):
    spec = small_spec(dtype, layers, heads, dim)
    block = block_at(spec, chain_of(range(count), 48), 0)
    raw = block.arrays["v"].reshape(-1).view(np.uint8)
    raw[: len(bits)] = np.frombuffer(bits, np.uint8)[: raw.size]
    assert same_numbers(decode(encoded(block, name)), block)


def test_an_object_is_a_valid_safetensors_file(tmp_path):
    block = block_at(small_spec("bfloat16"), chain_of(range(16)))
    path = tmp_path / block.header.name
    path.write_bytes(encoded(block))
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == FORMAT
        assert file.metadata()["key"] == block.header.key.hex()
        assert sorted(file.keys()) == ["k", "tokens", "v"]
        assert file.get_slice("k").get_shape() == [2, 2, 16, 8]
        assert file.get_tensor("tokens").tolist() == list(range(16))


def test_a_block_written_in_place_equals_an_encoded_one():
    block = block_at(mixed_spec(), chain_of(range(16)))
    layout = raw_layout(block.header)
    buffer = memoryview(bytearray(layout.size))
    tokens, arrays = layout.views(buffer)
    tokens[:] = block.tokens
    for name, array in arrays.items():
        array[...] = block.arrays[name]
    layout.write_header(buffer)
    assert buffer == encoded(block)


def test_lossless_saves_on_numbers_like_a_models():
    spec = small_spec("bfloat16", layers=8, heads=3, dim=64)
    block = block_at(spec, chain_of(range(256), 256))
    ratio = len(encoded(block)) / len(encoded(block, "lossless"))
    assert ratio > 1.3


# damage


@pytest.mark.parametrize("name", EXACT)
def test_an_object_cut_at_any_length_is_refused(name):
    data = encoded(block_at(small_spec(layers=1, heads=1, dim=2), chain_of(range(16))), name)
    for length in range(len(data)):
        with pytest.raises(InvalidObject):
            decode(data[:length])
    with pytest.raises(InvalidObject):
        decode(memoryview(bytes(data) + b"x"))


@pytest.mark.parametrize("name", EXACT)
def test_every_single_flipped_bit_is_noticed(name):
    data = encoded(block_at(small_spec(layers=1, heads=1, dim=2), chain_of(range(16))), name)
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(InvalidObject):
                decode(data)
            data[at] ^= 1 << bit
    decode(data)


def test_two_objects_of_equal_size_cannot_stand_for_each_other():
    spec = small_spec()
    kept = chain_of(range(32))
    one, two = block_at(spec, kept, 0), block_at(spec, kept, 1)
    assert len(encoded(one)) == len(encoded(two))
    with pytest.raises(InvalidObject, match="key differs"):
        decode(encoded(two), Expected(one.header.key, spec))


@pytest.mark.parametrize(
    "change",
    [
        {"variant": b"w" * 32},
        {"kin": b"x" * 32},
        {"adapter": b"a" * 32},
        {"layers": (LayerSpec("full", 2, 8, 8, None, RopeSpec(1e4, 8)),) * 2},
        {"layers": (LayerSpec("full", 2, 8, 8, None, RopeSpec(1e5, 8)),) * 3},
    ],
)
def test_a_block_of_another_model_is_refused_by_the_field_that_differs(change):
    spec = small_spec()
    block = block_at(spec, chain_of(range(16)))
    with pytest.raises(InvalidObject, match=next(iter(change))):
        decode(encoded(block), Expected(block.header.key, replace(spec, **change)))


def forged(change=None, document=None, text=None):
    """An object with a header of our making, its checksums right: what a hostile writer can produce."""
    data = bytes(encoded(block_at(small_spec(layers=1, heads=1, dim=2), chain_of(range(16)))))
    (length,) = struct.unpack("<Q", data[:8])
    if text is None:
        doc = json.loads(data[8 : 8 + length])
        if change:
            change(doc)
        if document is not None:
            doc = document
        meta = doc.get("__metadata__")
        if isinstance(meta, dict):
            doc = {
                "__metadata__": {"checksum": "0" * 16, **{k: v for k, v in meta.items() if k != "checksum"}},
                **{k: v for k, v in doc.items() if k != "__metadata__"},
            }
        text = json.dumps(doc, separators=(",", ":")).encode()
    head = bytearray(struct.pack("<Q", len(text)) + text)
    at = 8 + len(b'{"__metadata__":{"checksum":"')
    head[at : at + 16] = f"{xxhash.xxh3_64_intdigest(bytes(head)):016x}".encode()
    return memoryview(bytes(head) + data[8 + length :])


def _meta(**fields):
    return lambda doc: doc["__metadata__"].update({k.rstrip("_"): v for k, v in fields.items()})


def _tensor(name, **fields):
    return lambda doc: doc[name].update(fields)


HOSTILE = {
    "huge count": _meta(count=str(2**62)),
    "count above 64 bits": _meta(count=str(2**70)),
    "negative count": _meta(count="-1"),
    "zero count": _meta(count="0"),
    "huge first": _meta(first=str(2**63)),
    "a million layers": _meta(layers=json.dumps([[10**6, "full", 1, 2, 2, None, None]])),
    "many runs": _meta(layers=json.dumps([[4096, "full", 1, 2, 2, None, None]] * 100)),
    "negative heads": _meta(layers=json.dumps([[1, "full", -1, 2, 2, None, None]])),
    "huge heads": _meta(layers=json.dumps([[1, "full", 2**40, 2, 2, None, None]])),
    "unknown kind": _meta(layers=json.dumps([[1, "magic", 1, 2, 2, None, None]])),
    "no layers": _meta(layers="[]"),
    "layers nested deep": _meta(layers="[" * 100_000 + "]" * 100_000),
    "slice beyond the model": _meta(slice="l0-99_h0-1of1"),
    "slice of nothing": _meta(slice="l0-0_h0-1of1"),
    "unknown dtype": _meta(dtype="float8"),
    "codec of another world": _meta(codec="../../etc"),
    "unknown codec": _meta(codec="zip"),
    "unknown features": _meta(features="ragged"),
    "another format": _meta(format="retain/2"),
    "short key": _meta(key="00"),
    "key of capitals": lambda doc: doc["__metadata__"].update(
        key=doc["__metadata__"]["key"].upper().replace("0", "A")
    ),
    "metadata of numbers": lambda doc: doc["__metadata__"].update(count=16),
    "no metadata field": lambda doc: doc["__metadata__"].pop("variant"),
    "shape of 2**63": _tensor("k", shape=[2**63, 1, 1, 1]),
    "shape that overflows": _tensor("k", shape=[2**40, 2**40, 2**40, 1]),
    "negative shape": _tensor("k", shape=[-1, 1, 16, 2]),
    "many dimensions": _tensor("k", shape=[1] * 1000),
    "offsets elsewhere": _tensor("k", data_offsets=[0, 128]),
    "offsets reversed": _tensor("k", data_offsets=[192, 64]),
    "unknown tensor dtype": _tensor("k", dtype="F8_E4M3"),
    "unknown tensor field": _tensor("k", extra=1),
    "transposed k": _tensor("k", shape=[1, 1, 2, 16]),
    "k of another dtype": _tensor("k", dtype="U32"),
    "too few checksums": _meta(xxh3="0" * 16),
    "checksums of words": _meta(xxh3="zz zz zz"),
    "token ids gone": lambda doc: doc.pop("tokens"),
}


def test_a_forged_header_without_a_lie_is_taken():
    decode(forged())


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused_before_anything_is_allocated(change):
    with pytest.raises(InvalidObject):
        decode(forged(change))


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 0),
        b"",
        b"\0" * 7,
        b"GGUF" * 100,
    ],
)
def test_what_is_no_object_is_refused(head):
    with pytest.raises(InvalidObject):
        decode(memoryview(head))


def test_a_header_nested_deep_is_refused():
    opening = b'{"__metadata__":{"checksum":"0000000000000000"},"a":'
    with pytest.raises(InvalidObject):
        decode(forged(text=opening + b"[" * 200_000 + b"]" * 200_000 + b"}"))


def test_token_ids_that_do_not_give_the_key_are_noticed():
    block = block_at(small_spec(), chain_of(range(16)))
    other = replace(block, tokens=block.tokens + 1)
    with pytest.raises(InvalidObject, match="key"):
        verify_object(encoded(other))


def test_media_travel_in_the_header_and_count_in_the_key():
    space = space_of(b"k" * 32)
    media = [Media(20, 8, b"m" * 32)]
    made = chain(space, range(64), 16, media)
    block = block_at(small_spec(), made, 1)
    assert block.header.key == made.keys[1]
    assert parse_frame(encoded(block)).header.media == (Media(4, 8, b"m" * 32),)
    verify_object(encoded(block))


# names and slices


def test_an_objects_name_says_what_it_is_and_reads_back():
    block = block_at(small_spec(), chain_of(range(16)))
    key, form = split_name(block.header.name)
    assert key == block.header.key
    assert form.endswith(".l0-2_h0-1of1.raw")
    assert object_name(key, b"v" * 32, Slice(0, 2), "raw", b"l" * 32).endswith(".raw." + (b"l" * 16).hex())
    for bad in (
        "",
        "x",
        key.hex(),
        key.hex() + ".a.b.c",
        block.header.name.upper(),
        block.header.name + ".x",
    ):
        with pytest.raises(ValueError, match="not"):
            split_name(bad)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 7), st.integers(1, 8), st.integers(1, 16))
def test_a_slices_text_reads_back_to_the_same_slice(start, layers, low, share, parts):
    if low + share > parts:
        return
    made = Slice(start, start + layers, low, low + share, parts)
    assert Slice.parse(made.text) == made


def test_a_share_of_heads_is_one_slice_however_it_is_written():
    assert Slice(0, 2, 1, 2, 2) == Slice(0, 2, 2, 4, 4)
    assert list(Slice(0, 2, 1, 2, 2).heads(4)) == [2, 3]
    with pytest.raises(ValueError, match="evenly"):
        Slice(0, 2, 1, 2, 2).heads(3)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_reader_assembles_its_slice_from_slices_of_any_other_split(data):
    spec = small_spec(layers=6, heads=12, dim=2)
    made = chain_of(range(16))
    whole = block_at(spec, made, seed=5)
    rows = data.draw(st.sampled_from([[0, 6], [0, 2, 6], [0, 1, 3, 4, 6]]))
    parts = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    slices = [Slice(a, b, i, i + 1, parts) for a, b in itertools.pairwise(rows) for i in range(parts)]
    pieces = [decode(encoded(cut(whole, each))) for each in data.draw(st.permutations(slices))]
    wanted_parts = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    low = data.draw(st.integers(0, wanted_parts - 1))
    first = data.draw(st.integers(0, 5))
    wanted = Slice(
        first,
        data.draw(st.integers(first + 1, 6)),
        low,
        data.draw(st.integers(low + 1, wanted_parts)),
        wanted_parts,
    )
    got = assemble(pieces, wanted)
    assert got.header.slice == wanted
    assert same_numbers(got, cut(whole, wanted))
    heads = wanted.heads(12)
    expected = whole.arrays["k"][wanted.layer_start : wanted.layer_stop, heads.start : heads.stop]
    assert got.arrays["k"].tobytes() == expected.tobytes()


def test_what_slices_do_not_cover_is_not_made_up():
    whole = block_at(small_spec(layers=2, heads=2), chain_of(range(16)))
    half = cut(whole, Slice(0, 2, 0, 1, 2))
    with pytest.raises(ValueError, match="do not cover"):
        assemble([half], Slice(0, 2))


def test_a_layer_of_a_mixed_model_is_found_in_its_group():
    spec = mixed_spec()
    block = block_at(spec, chain_of(range(16)))
    for index, layer in enumerate(spec.layers):
        key, value = block.layer(index)
        assert key.shape == (layer.heads, 16, layer.k_dim)
        assert (value is None) == (layer.v_dim == 0)
    assert block.layer(2)[0].base is not None
    assert np.shares_memory(block.layer(2)[0], block.arrays["k.0"][1])


def test_a_model_of_impossible_layers_is_refused():
    from retain.errors import UnsupportedModel

    for bad in (("full", 0, 8, 8), ("magic", 1, 8, 8), ("sliding", 1, 8, 8), ("full", 1, 8, 8, 5)):
        with pytest.raises(UnsupportedModel):
            LayerSpec(*bad)
    with pytest.raises(UnsupportedModel, match="float64"):
        ModelSpec("m", "a", (LayerSpec("full", 1, 8, 8),), "float64", b"k" * 32, b"v" * 32)
