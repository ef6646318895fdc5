"""Handshakes between transformers and llama.cpp: what passes, what is found out, and what is shared after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from retain.bench import handshake
from retain.bench.handshake import Side, shake
from retain.engines import llamacpp, transformers
from retain.engines.llamacpp.capture import PRODUCER
from retain.handshake import Verdict, peers_in, peers_of, read
from retain.model import LayerSpec, ModelSpec
from tests.engines.llamacpp.conftest import MODELS
from tests.engines.transformers.tiny import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROBE = [int(each) for each in np.random.default_rng(7).integers(2, VOCABULARY, 600)]


@pytest.fixture(autouse=True)
def _records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One of MODELS as transformers holds it."""

    def saved(name: str) -> Path:
        path: Path = tmp_path_factory.mktemp("models") / name
        MODELS[name]().save_pretrained(path)
        words = tokenizers.Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, "w0"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
        return path

    return saved


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-31", "llama-yarn", "qwen2", "qwen3", "gemma3-window-32"]
)
def test_families_with_permuted_keys_and_without_pass_both_ways(
    name: str, gguf: Callable[[str], Path], folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = shake(_sides(gguf(name), folder(name), "float32", flash=False), PROBE)
    assert len(verdicts) == 2
    for each in verdicts:
        assert each.passed, each.reason
        assert max(*each.k, *each.v) < 1e-3
        assert each.kl < 1e-5
        assert each.kinship == "kin"
    assert len(read()) == 2


def _sides(file: Path, directory: Path, dtype: str, *, flash: bool) -> list[Side]:
    options: dict[str, Any] = {"dtype": dtype, "flash": flash, "threads": 1, "context": 1024}
    return [
        Side("transformers", str(directory), None, {"threads": 1}),
        Side("llamacpp", str(file), None, options),
    ]


def test_a_missing_permutation_is_found_and_nothing_is_shared(
    gguf: Callable[[str], Path], folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retain.gguf.GgufFile.interleaved", False)
    monkeypatch.setattr("retain.engines.llamacpp.selftest.check", lambda host: None)
    verdicts = shake(_sides(gguf("llama-gqa"), folder("llama-gqa"), "float32", flash=False), PROBE)
    assert [each.passed for each in verdicts] == [False, False]
    assert all("apart" in each.reason for each in verdicts)
    assert max(verdicts[0].k) > 0.5
    assert max(verdicts[0].v) < 1e-3


def test_after_a_handshake_one_engine_continues_on_the_others_kv_and_says_so(
    gguf: Callable[[str], Path], opened: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    file = gguf("llama-gqa")
    shake(_sides(file, folder("llama-gqa"), "float16", flash=True), PROBE)
    import torch

    from retain.engines.transformers.loading import load

    settings = llamacpp.Settings(threads=1, context=1024)
    cache = opened()
    loaded = load(str(folder("llama-gqa")))
    tokens = PROBE[:560]
    with (
        transformers.attach(loaded.model, None, cache, spec=loaded.spec) as writer,
        llamacpp.attach(str(file), cache, settings) as reader,
    ):
        assert peers_of(reader.spec, PRODUCER)
        writer.forward(torch.tensor([tokens]))
        assert writer.settle()
        exact = reader.forward(tokens, fidelity="exact")
        assert exact.report.reused_tokens == 0
        assert reader.settle()
        cache.clear()
        writer.forward(torch.tensor([tokens]))
        assert writer.settle()
        kin = reader.forward(tokens)
        assert kin.report.classes == {"kin": 559}
        assert kin.report.fidelity == "kin"
        assert handshake.mean_kl(exact.logits, kin.logits) < 1e-3
        assert reader.settle()
        # What was computed behind it is kin too: found again as that, and never as exact.
        longer = [*tokens, *PROBE[560:]]
        again = reader.forward(longer)
        assert again.report.classes == {"kin": again.report.reused_tokens}
        assert reader.forward(longer, fidelity="exact").report.reused_tokens == 0


def test_kin_kv_of_less_than_a_block_serves_too(
    gguf: Callable[[str], Path], opened: Callable[..., Any], folder: Callable[[str], Path]
) -> None:
    import torch

    from retain.engines.transformers.loading import load

    shake(_sides(gguf("llama-gqa"), folder("llama-gqa"), "float32", flash=False), PROBE)
    settings = llamacpp.Settings(threads=1, context=1024, flash=False, dtype="float32")
    cache = opened()
    loaded = load(str(folder("llama-gqa")))
    with (
        transformers.attach(loaded.model, None, cache, spec=loaded.spec) as writer,
        llamacpp.attach(str(gguf("llama-gqa")), cache, settings) as reader,
    ):
        for length, found in ((200, 192), (256, 255)):
            writer.forward(torch.tensor([PROBE[:length]]), salt=str(length))
            assert writer.settle()
            assert reader.forward(PROBE[:length], salt=str(length)).report.classes == {"kin": found}


def test_float32_kv_is_interchanged_in_half_the_bytes_at_little_loss(
    gguf: Callable[[str], Path], opened: Callable[..., Any]
) -> None:
    settings = llamacpp.Settings(threads=1, context=1024, flash=False, dtype="float32")
    sizes, logits = [], []
    for interchange in (None, "float16"):
        cache = opened()
        with llamacpp.attach(str(gguf("llama-gqa")), cache, settings, interchange=interchange) as engine:
            engine.forward(PROBE)
            assert engine.settle()
            found = engine.forward(PROBE)
            assert found.report.reused_tokens == 592
            assert found.report.classes == {"exact" if interchange is None else "kin": 592}
            sizes.append(cache.stats().counters["stored_bytes"])
            logits.append(found.logits)
            assert not cache.stats().failures
    assert sizes[1] < 0.55 * sizes[0]
    assert 0 < handshake.mean_kl(logits[0], logits[1]) < 1e-4


def test_a_record_of_another_version_of_an_engine_counts_for_nothing(
    gguf: Callable[[str], Path], folder: Callable[[str], Path]
) -> None:
    shake(_sides(gguf("llama-1-layer"), folder("llama-1-layer"), "float32", flash=False), PROBE)
    verdicts = read()
    reader = next(each for each in verdicts if each.reader.engine == "llamacpp")
    model = ModelSpec(
        "m", "llama", (LayerSpec("full", 1, 2, 2),), "float32", reader.kin, reader.reader.variant
    )

    def trusted(record: list[Verdict], producer: str) -> bool:
        return reader.writer.variant in {peer.variant for peer in peers_in(record, model, producer)}

    assert trusted(verdicts, PRODUCER)
    assert not trusted(verdicts, PRODUCER + "1")
    assert not trusted([replace(reader, passed=False)], PRODUCER)
