"""Loading: the same model whichever way it is loaded, and the tokens of llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from retain.engines.transformers import loading
from retain.engines.transformers.identity import spec_of
from retain.errors import UnsupportedModel
from retain.fingerprint import kin_of_files
from retain.models import find
from tests.model.tiny import tiny_model

pytestmark = pytest.mark.engine

GOLDEN = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text())
hf: Any = transformers


@pytest.mark.parametrize("part", range(0, len(GOLDEN), 50))
def test_the_packaged_smollm2_tokenises_as_llama_cpp_does(smollm2: Any, part: int) -> None:
    for pair in GOLDEN[part : part + 50]:
        assert smollm2.tokenizer(pair["text"])["input_ids"] == pair["ids"], pair["text"]


def test_smollm2_has_its_geometry_template_and_end_token(smollm2: Any) -> None:
    layer = smollm2.spec.layers[0]
    assert (len(smollm2.spec.layers), layer.heads, layer.k_dim, layer.v_dim) == (30, 3, 64, 64)
    assert (smollm2.spec.token_bytes, smollm2.spec.dtype) == (46080, "float32")
    assert smollm2.spec.name == "SmolLM2-135M-Instruct"
    text = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    end = smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert smollm2.tokenizer.eos_token_id == end == smollm2.model.generation_config.eos_token_id
    assert not smollm2.model.training


def test_smollm2_answers_and_stops(smollm2: Any) -> None:
    inputs = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        found = smollm2.model.generate(**inputs, max_new_tokens=30, do_sample=False)[0]
    answer = smollm2.tokenizer.decode(found[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_the_kin_of_smollm2_is_one_for_its_gguf_file_and_the_live_model(smollm2: Any) -> None:
    assert kin_of_files(find("smollm2").path) == smollm2.spec.kin
    assert spec_of(smollm2.model, smollm2.spec.name) == smollm2.spec


def test_the_spec_of_smollm2_takes_well_under_a_second(smollm2: Any) -> None:
    started = time.process_time()
    spec_of(smollm2.model)
    assert time.process_time() - started < 1.0


@pytest.mark.slow
def test_transformers_own_loading_of_the_gguf_file_gives_the_same_spec(smollm2: Any) -> None:
    path = find("smollm2").path
    model = hf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    assert spec_of(model, smollm2.spec.name) == smollm2.spec


@pytest.mark.slow
def test_a_gguf_file_is_converted_once_and_its_digests_are_remembered(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    assert loading.load("smollm2", cache=tmp_path, progress=told.append).spec == smollm2.spec
    assert [line.split()[0] for line in told] == ["converting", "converted"]
    assert len(os.listdir(tmp_path / "models")) == 1
    time.sleep(0.1)
    loading.load("smollm2", cache=tmp_path, progress=told.append)
    assert len(told) == 2

    def refuse(*_: Any) -> Any:
        raise AssertionError("the weights were digested again")

    monkeypatch.setattr(loading, "weight_digests", refuse)
    assert loading.load("smollm2", cache=tmp_path, progress=told.append).spec == smollm2.spec
    shutil.rmtree(tmp_path / "models")


@pytest.fixture
def directory(tmp_path: Path, smollm2: Any) -> Path:
    """A directory with a tiny model and a tokenizer."""
    place = tmp_path / "tiny"
    tiny_model("llama-gqa").save_pretrained(place)
    smollm2.tokenizer.save_pretrained(place)
    time.sleep(0.1)
    return place


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loaded_model_and_one_of_auto_model_are_one_variant(
    directory: Path, tmp_path: Path, dtype: str
) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    )
    first = loading.load(str(directory), dtype, cache=tmp_path).spec
    assert first == spec_of(model, "tiny")
    assert loading.load(str(directory), dtype, cache=tmp_path).spec == first
    assert first.dtype == dtype


def test_remembered_digests_are_not_those_of_changed_weights(directory: Path, tmp_path: Path) -> None:
    before = loading.load(str(directory), cache=tmp_path).spec
    model = tiny_model("llama-gqa")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    model.save_pretrained(directory)
    after = loading.load(str(directory), cache=tmp_path).spec
    assert after.variant != before.variant
    assert after == spec_of(model, "tiny")


def test_a_wrong_dtype_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="float8"):
        loading.load(str(directory), "float8", cache=tmp_path)


def test_loading_reaches_for_no_hub(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any) -> Any:
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    loading.load(str(directory), cache=tmp_path)
