"""Servers that the tests of stores share, one of each kind for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.servers import Running, redis_server, s3_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found
