"""API keys, and where a server without them may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from retain.errors import ConfigError
from retain.gateway.refusal import Refusal
from retain.gateway.tenants import Tenant, Tenants, check_bind, read_api_keys


def test_keys_are_read_from_texts_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nbob=bob=secret\n\n  carol=carol-secret  \n")
    assert read_api_keys(["ann=ann-secret"], file) == {
        "ann": "ann-secret",
        "bob": "bob=secret",
        "carol": "carol-secret",
    }


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["hunter2-hunter2"], "API key 1"),
        (["=hunter2-hunter2"], "API key 1"),
        (["a b=hunter2-hunter2"], "API key 1"),
        (["ann=short"], "8 to 512"),
        (["ann=hunter2 hunter2"], "8 to 512"),
        (["ann=hunter2-hunter2", "ann=hunter3-hunter3"], "each name has one"),
        (["ann=hunter2-hunter2", "bob=hunter2-hunter2"], "its own"),
    ],
)
def test_a_bad_key_is_refused_without_being_quoted(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_api_keys(lines)
    assert "hunter" not in str(caught.value)


def test_a_missing_file_of_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys([], tmp_path / "nothing")


def test_a_key_gives_its_tenant_and_only_the_whole_key_does() -> None:
    tenants = Tenants({"ann": "ann-secret", "admin": "admin-secret"})
    assert tenants.of("Bearer ann-secret") == Tenant("ann")
    assert tenants.of("bearer  ann-secret ") == Tenant("ann")
    assert tenants.operator("Bearer admin-secret").name == "admin"
    for header in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic ann-secret",
        "ann-secret",
        "Bearer ann-secre",
        "Bearer \udcff",
    ):
        with pytest.raises(Refusal) as caught:
            tenants.of(header)
        assert caught.value.status == 401
    with pytest.raises(Refusal) as caught:
        tenants.operator("Bearer ann-secret")
    assert caught.value.status == 403


def test_without_keys_everybody_is_the_operator() -> None:
    assert Tenants().operator(None) == Tenant(None)
    assert Tenants().of("Bearer whatever") == Tenant(None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1"])
def test_a_loopback_address_needs_no_keys(host: str) -> None:
    check_bind(host, {}, allow_open=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])
def test_an_address_that_others_reach_needs_keys_or_an_explicit_word(host: str) -> None:
    with pytest.raises(ConfigError, match="without API keys"):
        check_bind(host, {}, allow_open=False)
    check_bind(host, {"ann": "ann-secret"}, allow_open=False)
    check_bind(host, {}, allow_open=True)
