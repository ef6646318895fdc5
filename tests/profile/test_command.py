"""`retain profile`: from a model's folder and a text to a profile on the shelf."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import retain
from retain.cli.app import app
from retain.codecs.ladder import shelf
from retain.engines.transformers import attach
from retain.engines.transformers.loading import load
from retain.errors import ConfigError
from retain.fidelity import PROMISED
from tests.engines.transformers.tiny import VOCABULARY, llama
from tests.profile.conftest import text

pytestmark = pytest.mark.engine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tiny model and a tokenizer of one token a word."""
    folder = tmp_path / "model"
    llama().save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def test_a_profile_is_learned_from_texts_and_stored_blocks(
    model: Path, tmp_path: Path, cache_folder: Path
) -> None:
    file = tmp_path / "text"
    file.write_text(" ".join(f"w{number}" for number in text(5, 10 * 2048)))
    loaded = load(str(model))
    tier = f"disk:{tmp_path / 'kv'}"
    with retain.open("memory:64MiB", tier) as cache, attach(loaded.model, None, cache) as engine:
        engine.forward([text(6, 1000).tolist()])
        assert engine.settle()
        assert cache.flush()
    command = ["profile", str(model), "--text", str(file), "--fast", "--stored", "--tier", tier, "--json"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert Path(told["file"]).stat().st_size == told["bytes"]
    assert list(told["levels"]) == ["tiny", "balanced", "near", "fine"]
    newest = shelf.profile_for(loaded.spec.kin)
    assert newest is not None
    assert newest.digest.hex() == told["digest"]
    assert newest.declared["near"][0] < PROMISED["near"]


def test_a_text_that_is_too_short_is_refused(model: Path, tmp_path: Path, cache_folder: Path) -> None:
    file = tmp_path / "text"
    file.write_text("w1 w2")
    ran = CliRunner().invoke(app, ["profile", str(model), "--text", str(file)])
    assert isinstance(ran.exception, ConfigError)
    assert "needs 256 tokens" in str(ran.exception)
