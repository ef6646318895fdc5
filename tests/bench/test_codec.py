"""The bench of codecs: rivals that do what they are said to, texts of every kind, and every byte counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.bench import codec_rivals as rivals
from retain.bench.codec_texts import documents
from retain.errors import ConfigError


def layers(seed: int = 0, tokens: int = 300, heads: int = 2, size: int = 64) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.standard_normal((heads, tokens, size)).astype(np.float32) * 3 for _ in "kv")
        for _ in range(2)
    ]


def bits_of(coded: rivals.Coded, kv: list[tuple[Any, Any]]) -> float:
    return coded.bits / sum(k.size + v.size for k, v in kv)


@pytest.mark.engine
def test_casts_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.concatenate(
        [np.random.default_rng(1).standard_normal(2_000) * 2.0**e for e in range(-12, 11)]
    ).astype(np.float32)
    numbers = np.concatenate([numbers, [0.0, -0.0, 448.0, -460.0, 2.0**-9, 2.0**-10]]).astype(np.float32)
    tensor = torch.from_numpy(numbers)
    assert np.array_equal(rivals.to_bfloat16(numbers), tensor.bfloat16().float().numpy())
    wanted = tensor.clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(rivals.to_e4m3(numbers), wanted)


@pytest.mark.parametrize(
    ("code", "bits", "worst"),
    [
        (rivals.float16, 16, 1e-2),
        (rivals.bfloat16, 16, 0.07),
        (rivals.fp8, 8, 1.0),
        (rivals.int8, 8.25, 0.08),
        (rivals.kivi, 5.0, 0.9),
    ],
    ids=["fp16", "bf16", "fp8", "int8", "kivi"],
)
def test_rivals_take_the_bits_they_are_said_to_and_err_as_little(
    code: Callable[[Any], rivals.Coded], bits: float, worst: float
) -> None:
    kv = layers(tokens=2048 + 32)
    coded = code(kv)
    assert bits_of(coded, kv) == pytest.approx(bits, rel=0.03)
    errors = [np.abs(a - b).max() for old, new in zip(kv, coded.layers, strict=True)
              for a, b in zip(old, new, strict=True)]  # fmt: skip
    assert 0 < max(errors) < worst


def test_kivi_keeps_the_last_keys_and_takes_any_head_size() -> None:
    kv = layers(tokens=50, size=80)
    coded = rivals.kivi(kv)
    assert np.array_equal(coded.layers[0][0][:, 32:], kv[0][0][:, 32:].astype(np.float16).astype(np.float32))
    assert coded.layers[1][1].shape == kv[1][1].shape


def test_every_kind_of_text_is_there(data: Path) -> None:
    found = documents(lambda text: list(text.encode()), 10_000, (), data)
    assert [each.kind for each in found] == ["prose", "code", "dialogue", "table"]


def test_texts_of_ones_own_are_judged_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("x" * 40)
    (found,) = documents(lambda text: [ord(c) for c in text], 40, [file], None)
    assert found.kind == "mine.txt"
    assert found.tokens.tolist() == [120] * 40
    with pytest.raises(ConfigError, match="40 tokens, too few for 41"):
        documents(lambda text: [ord(c) for c in text], 41, [file], None)
    with pytest.raises(ConfigError, match="RETAIN_DATA"):
        documents(lambda text: [], 41, (), None)


def test_cachegen_that_does_not_run_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named lmcache >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="no module named lmcache"):
        rivals.lmcache_cachegen(layers(), str(python), tmp_path)
    with pytest.raises(ConfigError, match="one shape"):
        rivals.lmcache_cachegen([*layers(), *layers(size=32)], str(python), tmp_path)


@pytest.mark.engine
def test_levels_are_judged_through_real_objects_and_a_table_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # tiny models are far slower on more, on a busy machine
    from retain.bench import codec as bench
    from retain.bench.codec_objects import LEVELS, lossless, through_objects
    from retain.bench.codec_texts import Document
    from retain.codecs.ladder import shelf
    from tests.profile.conftest import learned, text, tiny

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shelf.keep(learned("llama-gqa"))
    _, study = tiny("llama-gqa")
    document = Document("random", text(7, 700))
    kv = study.context(document.tokens[:640])
    reference = study.reference(kv, document.tokens[640:])
    found = {}
    contenders = {
        "bf16": lambda _, kv: rivals.bfloat16(kv),
        "lossless (bf16)": lambda text, kv: lossless(study.spec, text.tokens, kv),
        **{
            level: lambda text, kv, level=level: through_objects(study.spec, text.tokens, kv, level)
            for level in LEVELS
        },
    }
    for name, code in contenders.items():
        found[name] = bench.Found()
        bench._judge(bench.Contender(name, code), document, kv, reference, found[name])
    report = bench._report([document], found, [1.0])
    assert report.passed
    ratios = report.ratios
    assert ratios["codec.tiny.ratio"] > ratios["codec.balanced.ratio"] > ratios["codec.near.ratio"]
    assert ratios["codec.tiny.kl"] > ratios["codec.balanced.kl"] > ratios["codec.near.kl"]
    assert ratios["codec.balanced.encode_over_prefill"] > 0
    assert bench.plot(report).axes[0].get_ylabel().startswith("mean KL")
