"""Encryption keeps the store's contract, and refuses whatever is not the very object under the right key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.cache import Query, open_cache
from retain.codecs import CODECS
from retain.errors import ConfigError, InvalidObject, StoreUnavailable
from retain.identity import salt_of
from retain.stores.base import Shared, Store
from retain.stores.disk import DiskStore
from retain.stores.encrypted import EncryptedStore, encrypted, read_keys
from retain.stores.memory import MemoryStore
from retain.stores.redis import RedisStore
from retain.stores.sealed import Keys, parse_sealed, plain_size, sealed_size
from retain.testing.store import StoreConformance, read
from tests.blocks import block_at, chain_of, mixed_spec, small_spec
from tests.stores.servers import Running

pytest.importorskip("cryptography")

SPEC = small_spec()
OLD, NEW = bytes(range(32)), bytes(range(1, 33))
KEYS = Keys.of([NEW])


class TestEncryptedDisk(StoreConformance):
    persistent = True
    examples = 8

    def make_store(self, directory: Path) -> Store:
        return encrypted(DiskStore(directory / "objects"), KEYS)


class TestEncryptedRedis(StoreConformance):
    persistent = True
    examples = 4
    race_seconds = 0.5

    @pytest.fixture(autouse=True)
    def server(self, redis: Running) -> None:
        self._port = redis.port

    def make_store(self, directory: Path) -> Store:
        return encrypted(
            RedisStore(f"redis://127.0.0.1:{self._port}", prefix=f"{directory}:", wait=10.0), KEYS
        )


def test_encryption_leaves_a_shared_store_shared(redis: Running) -> None:
    store = encrypted(RedisStore(f"redis://127.0.0.1:{redis.port}", prefix="enc:", wait=10.0), KEYS)
    assert isinstance(store, Shared)
    assert not isinstance(encrypted(MemoryStore(1 << 20), KEYS), Shared)
    store.write("object", [b"data"])
    assert store.sizes(["object", "nothing"]) == [4, None]
    store.close()


@given(st.integers(0, 1 << 40))
def test_the_plain_size_follows_from_the_sealed_one(size: int) -> None:
    assert plain_size(sealed_size(size)) == size
    assert sealed_size(size + 1) > sealed_size(size)


def kept(
    spec: Any = SPEC, codec: str = "raw", salt: bytes | None = None
) -> tuple[MemoryStore, Store, str, bytes]:
    """A sealed block: the store beneath, the encrypting one, its name, its plain bytes."""
    inner = MemoryStore(64 << 20)
    store = encrypted(inner, KEYS)
    block = block_at(spec, chain_of(range(32), salt=salt), 1)
    data = b"".join(block.encode(CODECS[codec]))
    name = block.header.name.replace(".raw", f".{codec}")
    store.write(name, [data])
    return inner, store, name, data


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("spec", [small_spec(), mixed_spec("bfloat16"), small_spec(layers=8, dim=64)])
def test_it_composes_with_every_codec(spec: Any, codec: str) -> None:
    inner, store, name, data = kept(spec, codec)
    assert read(store, name) == data
    raw = read(inner, name) or b""
    assert len(raw) == sealed_size(len(data))
    tokens = np.arange(16, 32, dtype="<u4").tobytes()
    assert tokens in data
    assert tokens not in raw, "token ids are encrypted"
    buffer = bytearray(16 << 10)
    assert store.read_into(name, memoryview(buffer)) == min(len(buffer), len(data))
    assert bytes(buffer[: len(data)]) == data[: len(buffer)]


def test_a_sealed_block_is_a_safetensors_file_whose_index_fields_are_readable(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    inner, _, name, data = kept()
    path = tmp_path / "object.safetensors"
    path.write_bytes(read(inner, name) or b"")
    with safetensors.safe_open(path, "numpy") as opened:
        told = opened.metadata()
        assert set(opened.keys()) == {"head", "tokens", "k", "v"}
    chain = chain_of(range(32))
    assert (told["key"], told["parent"]) == (chain.keys[1].hex(), chain.keys[0].hex())
    assert told["space"] == chain.space.hex()
    assert told["features"] == "sealed"
    assert "content" not in told, "a digest of the tokens alone would tell them to who can guess"
    assert "model" not in told
    head = parse_sealed(memoryview(path.read_bytes()))
    assert [part.name for part in head.parts] == ["head", "tokens", "k", "v"]
    assert head.plain_size == len(data)


def test_no_two_writes_are_alike() -> None:
    inner, store, name, data = kept()
    first = read(inner, name)
    store.write(name, [data])
    second = read(inner, name)
    assert first is not None
    assert second is not None
    same = sum(a == b for a, b in zip(first[-1024:], second[-1024:], strict=True))
    assert same < 32


@pytest.mark.parametrize("where", [10, 40, 300, 2500, 5000, -1])
def test_a_changed_byte_is_refused(where: int) -> None:
    inner, store, name, data = kept()
    raw = bytearray(read(inner, name) or b"")
    raw[where] ^= 1
    inner.write(name, [raw])
    with pytest.raises((InvalidObject, StoreUnavailable)):
        store.read_into(name, memoryview(bytearray(len(data))))


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_cut_object_is_refused(keep: int) -> None:
    inner, store, name, data = kept()
    raw = read(inner, name) or b""
    inner.write(name, [raw[:keep]])
    if keep == 0:
        assert store.read_into(name, memoryview(bytearray(len(data)))) == 0
        return
    with pytest.raises(InvalidObject):
        store.read_into(name, memoryview(bytearray(len(data))))


def test_an_object_under_anothers_name_is_refused() -> None:
    inner, store, name, data = kept()
    other = block_at(SPEC, chain_of(range(32)), 0)
    store.write(other.header.name, [b"".join(other.encode(CODECS["raw"]))])
    inner.write(name, [read(inner, other.header.name) or b""])
    with pytest.raises(InvalidObject, match="another object"):
        store.read_into(name, memoryview(bytearray(len(data))))
    store.write("a", [b"data"])
    inner.write("b", [read(inner, "a") or b""])
    with pytest.raises(InvalidObject, match="another object"):
        store.read_into("b", memoryview(bytearray(4)))


def test_swapped_tensors_and_segments_are_refused() -> None:
    inner, store, name, data = kept()
    raw = bytearray(read(inner, name) or b"")
    parts = {part.name: part for part in parse_sealed(memoryview(raw)).parts}
    k, v = parts["k"], parts["v"]
    assert k.sealed_size == v.sealed_size
    one, two = raw[k.start : k.start + k.sealed_size], raw[v.start : v.start + v.sealed_size]
    raw[k.start : k.start + k.sealed_size], raw[v.start : v.start + v.sealed_size] = two, one
    inner.write(name, [raw])
    with pytest.raises(InvalidObject, match="tensor k"):
        store.read_into(name, memoryview(bytearray(len(data))))


def test_a20_a_tensor_of_another_tenant_is_refused_though_the_master_key_is_the_same() -> None:
    inner, store, name, data = kept(salt=salt_of("alice"))
    other_inner, _, other, _ = kept(salt=salt_of("bob"))
    mine, theirs = bytearray(read(inner, name) or b""), read(other_inner, other) or b""
    part = parse_sealed(memoryview(mine)).parts[2]
    mine[part.start : part.start + part.sealed_size] = theirs[part.start : part.start + part.sealed_size]
    inner.write(name, [mine])
    with pytest.raises(InvalidObject, match="tensor k"):
        store.read_into(name, memoryview(bytearray(len(data))))


def test_keys_rotate_the_newest_seals_and_all_of_them_open() -> None:
    inner = MemoryStore(1 << 20)
    EncryptedStore(inner, Keys.of([OLD])).write("old", [b"data"])
    both = EncryptedStore(inner, Keys.of([NEW, OLD]))
    both.write("new", [b"more"])
    assert (read(both, "old"), read(both, "new")) == (b"data", b"more")
    only_old, only_new = EncryptedStore(inner, Keys.of([OLD])), EncryptedStore(inner, Keys.of([NEW]))
    assert read(only_new, "new") == b"more"
    for store, name in ((only_old, "new"), (only_new, "old")):
        with pytest.raises(StoreUnavailable, match="not among those given"):
            store.read_into(name, memoryview(bytearray(4)))


def test_what_is_not_sealed_is_not_taken() -> None:
    inner = MemoryStore(1 << 20)
    block = block_at(SPEC, chain_of(range(16)), 0)
    inner.write(block.header.name, block.encode(CODECS["raw"]))
    with pytest.raises(StoreUnavailable, match="not sealed"):
        encrypted(inner, KEYS).read_into(block.header.name, memoryview(bytearray(5000)))


@pytest.mark.parametrize(
    "text",
    [
        NEW.hex(),
        f"# newest\n{NEW.hex()} # 2026\n\n{OLD.hex()}",
        "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA=",
    ],
)
def test_keys_are_read_as_hex_or_base64(text: str) -> None:
    assert read_keys(text).newest == KEYS.newest


@pytest.mark.parametrize("text", ["", "# nothing", "secret", NEW.hex()[:-2], "0" * 63 + "g"])
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_keys(text)
    assert not text or text not in str(raised.value)
    assert NEW.hex() not in repr(KEYS)


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_cache_over_an_encrypted_folder_outlives_a_restart_and_a_rotation(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(OLD.hex())
    tier = f"disk:{tmp_path / 'kv'}?codec={codec}&keys=file:{keys}"
    prompt = chain_of(range(64))
    lossy = CODECS[codec].lossy
    query = Query(prompt, SPEC, fidelity="lossy" if lossy else "exact")
    with open_cache("memory:8MiB", tier) as cache:
        for index in range(4):
            assert cache.store(block_at(SPEC, prompt, index)).kept
    keys.write_text(f"{NEW.hex()}\n{OLD.hex()}")
    with open_cache("memory:8MiB", tier) as cache, cache.load(cache.lookup(query)) as loaded:
        assert loaded.tokens == 64
        assert lossy or loaded.blocks[3] == block_at(SPEC, prompt, 3)
    keys.write_text(NEW.hex())
    with open_cache("memory:8MiB", tier) as cache:
        assert cache.load(cache.lookup(query)).tokens == 0
        assert cache.stats().failures
    monkeypatch.setenv("KV_KEYS", f"{NEW.hex()},{OLD.hex()}")
    tier = f"disk:{tmp_path / 'kv'}?codec={codec}&keys=env:KV_KEYS"
    with open_cache("memory:8MiB", tier) as cache:
        assert cache.load(cache.lookup(query)).tokens == 64, "nothing was taken for damaged"
    plain = f"disk:{tmp_path / 'kv'}?codec={codec}"
    with open_cache("memory:8MiB", plain) as cache:
        assert cache.load(cache.lookup(query)).tokens == 0
    with open_cache("memory:8MiB", tier) as cache:
        assert cache.load(cache.lookup(query)).tokens == 64, "a reader without keys removes nothing"
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and len(path.name) > 64]
    assert len(files) == 4
    assert os.stat(files[0]).st_size > 0
