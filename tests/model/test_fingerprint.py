"""Kin and variant: equal for the same weights in every format, another for every other model."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.errors import UnsupportedModel
from retain.fingerprint import kin, kin_of_files, sample_positions, variant
from retain.gguf import GgufFile
from retain.weights import Indices, Values, open_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


class Held:
    """A weight held as a numpy array."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.shape = tuple(values.shape)

    def sample(self, rows: Indices, columns: Indices) -> Values:
        """The values at these places."""
        return np.asarray(self.values.reshape(-1, self.shape[-1])[rows, columns], np.float64)


def weights(seed: int = 0) -> dict[str, Held]:
    generator = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (32, 8)}
    shapes["model.layers.0.self_attn.k_proj.weight"] = (8, 8)
    return {name: Held(generator.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}


def test_the_kin_of_fixed_weights_is_pinned() -> None:
    fixed = {
        name: Held(np.arange(w.values.size, dtype=np.float32).reshape(w.shape) / 7)
        for name, w in weights().items()
    }
    assert kin(CONFIG, fixed).hex() == "8854665d0113b019f8c59e7371afc23592a2500e8151f49aa5b13243299164c3"


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 500000.0},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"num_attention_heads": 4},
        {"sliding_window": 8, "layer_types": ["sliding_attention"]},
        {"a_setting_nobody_has_heard_of": 3},
        {"tie_word_embeddings": True},
    ],
)
def test_a_setting_that_changes_numbers_changes_the_kin(change: dict[str, Any]) -> None:
    assert kin({**CONFIG, **change}, weights()) != kin(CONFIG, weights())


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": float(np.float32(1e-5))},
        {"torch_dtype": "bfloat16", "transformers_version": "4.1", "use_cache": False, "_name_or_path": "x"},
        {"bos_token_id": 7, "max_position_embeddings": 99, "attention_bias": False, "rope_scaling": None},
        {"hidden_act": "silu", "head_dim": 4, "num_key_value_heads": 2},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2},
    ],
)
def test_a_setting_without_effect_leaves_the_kin_alone(change: dict[str, Any]) -> None:
    assert kin({**CONFIG, **change}, weights()) == kin(CONFIG, weights())


def test_a_change_below_bfloat16_leaves_the_kin_alone_and_any_larger_one_changes_it() -> None:
    plain = weights()
    for name, weight in plain.items():
        rounded = {**plain, name: Held((weight.values.view(np.uint32) & 0xFFFF0000).view(np.float32))}
        nudged = {**plain, name: Held((rounded[name].values.view(np.uint32) | 0x1000).view(np.float32))}
        doubled = {**plain, name: Held(weight.values * 2)}
        assert kin(CONFIG, rounded) == kin(CONFIG, nudged)
        assert kin(CONFIG, doubled) != kin(CONFIG, plain)


@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 4000)),
        st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
        st.tuples(st.integers(1, 8), st.integers(1, 300), st.integers(1, 300)),
    )
)
def test_samples_lie_within_any_shape_and_spread_over_rows_and_columns(shape: tuple[int, ...]) -> None:
    rows, columns = sample_positions(shape)
    count, width = int(np.prod(shape[:-1])), shape[-1]
    assert rows.size == columns.size == 64
    assert 0 <= rows.min() <= rows.max() < count
    assert 0 <= columns.min() <= columns.max() < width
    assert len(set(rows.tolist())) == min(64, count)
    assert len(set(columns.tolist())) >= 0.7 * min(64, width)


def test_every_part_of_a_variant_counts() -> None:
    plain = variant(b"w" * 32, "float32", "transformers")
    others = {
        variant(b"v" * 32, "float32", "transformers"),
        variant(b"w" * 32, "bfloat16", "transformers"),
        variant(b"w" * 32, "float32", "vllm"),
        variant(b"w" * 32, "float32", "transformers", "quantised"),
    }
    assert len(others | {plain}) == 5
    assert variant(b"w" * 32, "float32", "transformers", "float") == plain
    with pytest.raises(UnsupportedModel, match="int8"):
        variant(b"w" * 32, "int8", "transformers")


def test_fingerprints_and_models_need_no_torch() -> None:
    program = (
        "import sys, retain.fingerprint, retain.models, retain.gguf, retain.digests\n"
        "assert not {'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_directory_with_pickled_weights_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        open_model(tmp_path)


def test_a_damaged_safetensors_file_is_refused_at_every_cut(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"model.a": np.ones((3, 5), np.float32), "model.b": np.ones(7, np.float16)}, path)
    (tmp_path / "config.json").write_text("{}")
    whole = path.read_bytes()
    assert set(open_model(tmp_path).weights) == {"model.a", "model.b"}
    for keep in range(len(whole)):
        path.write_bytes(whole[:keep])
        with pytest.raises(UnsupportedModel):
            open_model(tmp_path)


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UnsupportedModel, match=r"model-1\.safetensors"):
        open_model(tmp_path)


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the tiny Llama, float32."""
    pytest.importorskip("gguf")
    pytest.importorskip("torch")
    from tests.model.ggufs import write_gguf
    from tests.model.tiny import tiny_model

    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(tiny_model("llama-gqa"), path)
    return path


@pytest.mark.engine
def test_a_gguf_file_cut_short_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    whole = llama_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in (0, 3, 4, 20, 24, *range(25, len(whole) - 1, 997)):
        cut.write_bytes(whole[:keep])
        with pytest.raises(UnsupportedModel):
            kin_of_files(cut)


@pytest.mark.engine
def test_a_gguf_header_with_flipped_bytes_is_read_or_refused(llama_gguf: Path, tmp_path: Path) -> None:
    whole = bytearray(llama_gguf.read_bytes())
    broken = tmp_path / "broken.gguf"
    generator = random.Random(5)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 8)):
            damaged[generator.randrange(4, 6000)] = generator.randrange(256)
        broken.write_bytes(damaged)
        try:
            opened = GgufFile(broken)
            opened.config()
            opened.tensors()
        except UnsupportedModel:
            continue


@pytest.mark.engine
def test_a_gguf_file_of_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"mamba.*safetensors"):
        kin_of_files(path)


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "llama-mqa",
        "llama-head-80",
        "llama-one-layer",
        "llama-tied",
        "llama-31",
        "llama-yarn",
        "qwen2",
        "qwen3",
        "gemma3",
    ],
)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_the_kin_is_one_for_a_gguf_file_a_directory_and_a_live_model(
    name: str, kind: str, tmp_path: Path
) -> None:
    import gguf
    import torch

    from retain.engines.transformers.identity import spec_of
    from tests.model.ggufs import write_gguf
    from tests.model.tiny import tiny_model

    model = tiny_model(name)
    quantisation = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "model.gguf"
    write_gguf(model, path, quantisation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and kind != "F32":
                packed = gguf.quants.quantize(parameter.numpy(), quantisation)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quantisation)))
    model.save_pretrained(tmp_path / "directory")
    expected = spec_of(model)
    assert kin_of_files(path) == expected.kin
    assert kin_of_files(tmp_path / "directory") == expected.kin
    read = {key: tensor.read() for key, tensor in GgufFile(path).tensors().items()}
    for key, parameter in model.named_parameters():
        assert np.allclose(read[key], parameter.detach().numpy(), atol=2e-7)


@pytest.mark.engine
def test_the_kin_is_one_for_float32_and_bfloat16_and_for_one_file_and_many(tmp_path: Path) -> None:
    import torch

    from retain.engines.transformers.identity import spec_of
    from tests.model.tiny import tiny_model

    whole, halved = tiny_model("qwen3"), tiny_model("qwen3").to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "one")
    halved.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    kins = {
        spec_of(whole).kin,
        spec_of(halved).kin,
        *(kin_of_files(tmp_path / part) for part in ("one", "many")),
    }
    assert len(kins) == 1
    assert spec_of(whole).variant != spec_of(halved).variant


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        "gemma",
        "gemma2",
        "gemma3",
        "phi3",
        "phi3-longrope",
        "smollm3",
        "mistral",
        "qwen2-sliding",
        "mixtral",
        "qwen3-moe",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_the_kin_of_a_directory_is_that_of_the_model_loaded_from_it(name: str, tmp_path: Path) -> None:
    import transformers

    from retain.engines.transformers.identity import spec_of
    from tests.model.tiny import tiny_model

    tiny_model(name).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert kin_of_files(tmp_path) == spec_of(model).kin


@pytest.mark.engine
def test_the_language_part_of_a_vision_model_has_the_kin_of_the_language_model(tmp_path: Path) -> None:
    from retain.engines.transformers.identity import spec_of
    from tests.model.tiny import tiny_model

    model = tiny_model("gemma3")
    opened = {name: Held(p.detach().numpy()) for name, p in model.named_parameters()}
    nested: dict[str, Held] = {
        name.replace("model.", "model.language_model.", 1): weight for name, weight in opened.items()
    }
    nested["model.vision_tower.patch.weight"] = Held(np.ones((2, 2), np.float32))
    config = {"model_type": "gemma3", "text_config": model.config.to_dict()}
    assert kin(config, nested) == spec_of(model).kin


@pytest.mark.engine
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    layer=st.integers(0, 2),
    part=st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj"]),
)
def test_a_dense_low_rank_change_of_one_matrix_changes_kin_and_variant(
    seed: int, layer: int, part: str
) -> None:
    import torch

    from retain.engines.transformers.identity import spec_of
    from tests.model.tiny import tiny_model

    model = tiny_model("llama-gqa")
    before = spec_of(model)
    matrix = getattr(model.model.layers[layer].self_attn, part).weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        rows = torch.randn(matrix.shape[0], 2, generator=generator)
        matrix += 0.01 * rows @ torch.randn(2, matrix.shape[1], generator=generator)
    after = spec_of(model)
    assert after.kin != before.kin
    assert after.variant != before.variant
