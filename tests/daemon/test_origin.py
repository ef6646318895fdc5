"""A daemon's blocks over HTTP: one host's cache is another's tier, for reading and for uploads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from retain.cache import Cache, open_cache
from retain.codecs import CODECS
from retain.daemon.holdings import CacheHoldings
from retain.daemon.origin import OriginHandler, serve
from retain.errors import StoreUnavailable
from retain.stores.http import HttpStore
from retain.testing.store import read
from tests.blocks import block_at, chain_of, small_spec
from tests.cache.test_cache import fill, same
from tests.cache.test_cache import read as load
from tests.daemon.test_daemon import wait_for

TOKEN = "a-long-secret"
SPEC = small_spec()


@contextlib.contextmanager
def served(cache: Cache) -> Iterator[int]:
    handler = type("Handler", (OriginHandler,), {"holdings": CacheHoldings(cache), "token": TOKEN})
    server = serve(handler)
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KV_TOKEN", TOKEN)
    return "http://127.0.0.1:{port}/kv?token=env:KV_TOKEN&wait=5s&write={write}"


@pytest.mark.parametrize("from_disk", [False, True])
def test_one_hosts_cache_is_anothers_tier(tmp_path: Path, tier: str, from_disk: bool) -> None:
    prompt = chain_of(range(64))
    with open_cache("memory:8MiB", f"disk:{tmp_path / 'kv'}") as here, served(here) as port:
        blocks = fill(here, prompt)
        here.flush(10)
        if from_disk:
            here.clear(tier="memory")
        with open_cache("memory:8MiB", tier.format(port=port, write="no")) as there:
            tokens, got = load(there, prompt)
            assert tokens == 64
            assert same(got, blocks)
            assert there.clear(tier="http").objects == 0, "a tier that is only read is left as it is"
        wait_for(lambda: all(each.leased == 0 for each in here.stats().tiers.values()))


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.lossy])
def test_what_is_uploaded_is_verified_and_kept(tmp_path: Path, tier: str, codec: str) -> None:
    prompt = chain_of(range(64))
    with open_cache("memory:8MiB", f"disk:{tmp_path / 'kv'}") as here, served(here) as port:
        with open_cache("memory:8MiB", tier.format(port=port, write="yes") + f"&codec={codec}") as there:
            blocks = fill(there, prompt)
            assert there.flush(10)
            assert there.stats().failures == {}
        tokens, got = load(here, prompt)
        assert tokens == 64
        assert same(got, blocks)
        with open_cache("memory:8MiB", tier.format(port=port, write="yes") + f"&codec={codec}") as there:
            assert there.clear(space=prompt.space).objects >= 4
        assert load(here, prompt)[0] == 0 or codec != "raw"


def test_an_upload_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    prompt = chain_of(range(32))
    one, other = (block_at(SPEC, prompt, index) for index in range(2))
    with open_cache("memory:8MiB", f"disk:{tmp_path / 'kv'}") as here, served(here) as port:
        store = HttpStore(f"http://127.0.0.1:{port}/kv", token=TOKEN, writable=True, wait=5.0)
        good = b"".join(one.encode(CODECS["raw"]))
        for name, data in (
            (other.header.name, good),
            (one.header.name, good[:-1]),
            (one.header.name, good[:-1] + b"x"),
            ("object", b"data"),
        ):
            with pytest.raises(StoreUnavailable, match=r"422|507|down"):
                store.write(name, [data])
        assert load(here, prompt)[0] == 0
        store.close()
        again = HttpStore(f"http://127.0.0.1:{port}/kv", token=TOKEN, writable=True, wait=5.0)
        again.write(one.header.name, [good])
        assert read(again, one.header.name) == good
        assert load(here, prompt)[0] == 16
        again.close()
