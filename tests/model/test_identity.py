"""The spec of a live model: which weights it computes with, to the last bit."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from torch import nn

from retain.engines.transformers.identity import WeightWatch, adapter_of, content_digest, spec_of
from retain.errors import UnsupportedModel
from retain.header import object_name
from retain.identity import as_tokens, block_key, chain, root_key, space_of
from tests.model.tiny import CONFIGS, tiny_model

pytestmark = pytest.mark.engine
hf: Any = transformers


class Lora(nn.Module):
    """A linear layer with LoRA adapters beside it, laid out as PEFT lays them out."""

    def __init__(self, base: nn.Linear, seed: int, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.lora_A: Any = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B: Any = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]
        self.disable_adapters = False
        self.merged = False
        for part in (self.lora_A, self.lora_B):
            matrix: Any = part["default"].weight
            matrix.data = torch.randn(*matrix.shape, generator=generator) * 0.1

    def delta(self) -> torch.Tensor:
        """What the adapter adds to the weight."""
        down, up = self.lora_A["default"].weight, self.lora_B["default"].weight
        found: torch.Tensor = self.scaling["default"] * (up @ down)
        return found

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The base layer's output and the adapter's."""
        found: torch.Tensor = self.base_layer(inputs)
        for name in self.active_adapters:
            found = found + self.scaling[name] * self.lora_B[name](self.lora_A[name](inputs))
        return found


def adapted(seed: int = 1) -> tuple[Any, Lora]:
    """The tiny Llama with an adapter on the K projection of its second layer."""
    model = tiny_model("llama-gqa")
    attention = model.model.layers[1].self_attn
    attention.k_proj = Lora(attention.k_proj, seed)
    return model, attention.k_proj


@pytest.mark.parametrize("name", CONFIGS)
def test_the_spec_of_a_model_is_the_same_at_every_building(name: str) -> None:
    model = tiny_model(name)
    spec = spec_of(model, "tiny")
    assert spec == spec_of(tiny_model(name), "tiny")
    assert (spec.name, spec.dtype, spec.adapter) == ("tiny", "float32", None)
    assert len(spec.layers) == model.config.num_hidden_layers


def test_every_single_changed_weight_gives_another_variant() -> None:
    model = tiny_model("gemma3")
    seen = {spec_of(model).variant}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[-1] += 1e-3
            seen.add(spec_of(model).variant)
    assert len(seen) == 1 + len(list(model.parameters()))


def test_a_kept_buffer_counts_and_a_derived_one_does_not() -> None:
    model = tiny_model("deepseek-v3")
    before = spec_of(model)
    names = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert names
    model.get_buffer(names[0]).add_(1.0)
    after = spec_of(model)
    assert after.variant != before.variant
    model.model.rotary_emb.inv_freq.mul_(1.0)
    model(input_ids=torch.arange(8)[None])
    assert spec_of(model) == after


def test_dtype_shape_and_name_of_a_tensor_count() -> None:
    zeros = torch.zeros(2, 6)
    plain = content_digest({"a": zeros})
    assert content_digest({"a": zeros.clone()}) == plain
    assert content_digest({"a": torch.zeros(6, 2).t()}) == plain
    others = [
        content_digest({"b": zeros}),
        content_digest({"a": torch.zeros(6, 2)}),
        content_digest({"a": zeros.to(torch.int32)}),
        content_digest({"a": zeros.to(torch.bfloat16)}),
        content_digest({"a": zeros, "b": zeros}),
        content_digest({"a": -zeros}),
        content_digest({}),
    ]
    assert len({plain, *others}) == 8
    assert content_digest({"b": zeros, "a": zeros}) == content_digest({"a": zeros, "b": zeros})
    assert content_digest({"scalar": torch.tensor(1.0)}) != content_digest({"scalar": torch.tensor(2.0)})


def test_a_model_in_another_dtype_has_another_variant_and_the_same_kin() -> None:
    whole = tiny_model("qwen3")
    halved = tiny_model("qwen3").to(torch.bfloat16)
    assert spec_of(halved).dtype == "bfloat16"
    assert spec_of(halved).kin == spec_of(whole).kin
    assert spec_of(halved).variant != spec_of(whole).variant


def test_weights_quantised_at_run_time_are_a_numeric_class_of_their_own() -> None:
    model = tiny_model("llama-gqa")
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.mul(50).round().to(torch.int8), requires_grad=False)
    spec = spec_of(model)
    assert spec.dtype == "float32"
    assert spec.variant != spec_of(tiny_model("llama-gqa")).variant


def test_a_model_whose_weights_are_not_in_memory_is_refused_by_name() -> None:
    with torch.device("meta"):
        model: Any = hf.AutoModelForCausalLM.from_config(CONFIGS["llama-gqa"]())
    with pytest.raises(UnsupportedModel, match="embed_tokens"):
        spec_of(model)


def test_a19_an_adapter_on_the_k_projection_gives_other_keys_than_its_base_and_other_adapters() -> None:
    base = spec_of(tiny_model("llama-gqa"))
    first, second, again = (spec_of(adapted(seed)[0]) for seed in (1, 2, 1))
    assert base.adapter is None
    assert first.adapter is not None
    assert first.adapter == again.adapter != second.adapter
    assert first.kin == second.kin == base.kin
    assert first.variant == base.variant
    tokens = list(range(300))
    keys = {chain(space_of(spec.kin, spec.adapter), tokens).keys for spec in (base, first, second, again)}
    assert len(keys) == 3


def test_a19_a_merged_adapter_is_another_variant_and_its_blocks_have_other_names() -> None:
    base = spec_of(tiny_model("llama-gqa"))
    model, lora = adapted()
    with torch.no_grad():
        lora.base_layer.weight += lora.delta()
    model.model.layers[1].self_attn.k_proj = lora.base_layer
    merged = spec_of(model)
    assert merged.adapter is None
    assert merged.variant != base.variant
    assert merged.kin != base.kin
    tokens = as_tokens(list(range(256)))
    names = {
        object_name(
            block_key(root_key(space_of(spec.kin, spec.adapter)), tokens), spec.variant, spec.whole, "raw"
        )
        for spec in (base, merged)
    }
    assert len(names) == 2


def test_a19_the_kv_of_an_adapter_on_the_k_projection_does_differ() -> None:
    tokens = torch.arange(8)[None]
    plain = tiny_model("llama-gqa")(input_ids=tokens, use_cache=True).past_key_values
    other = adapted()[0](input_ids=tokens, use_cache=True).past_key_values
    assert torch.equal(plain.layers[0].keys, other.layers[0].keys)
    assert not torch.allclose(plain.layers[1].keys, other.layers[1].keys)


def test_a19_the_strength_of_an_adapter_counts_and_a_switched_off_one_is_none() -> None:
    model, lora = adapted()
    full = adapter_of(model)
    lora.scaling["default"] = 0.25
    assert adapter_of(model) not in (None, full)
    lora.scaling["default"] = 0.5
    assert adapter_of(model) == full
    lora.active_adapters = []
    assert adapter_of(model) is None
    lora.active_adapters = ["default"]
    lora.disable_adapters = True
    assert adapter_of(model) is None
    lora.disable_adapters = False
    lora.merged = True
    assert adapter_of(model) is None


def test_a19_an_adapter_that_is_loaded_and_not_used_does_not_count() -> None:
    model, lora = adapted()
    alone = adapter_of(model)
    lora.lora_A["spare"] = nn.Linear(lora.base_layer.in_features, 2, bias=False)
    lora.lora_B["spare"] = nn.Linear(2, lora.base_layer.out_features, bias=False)
    lora.scaling["spare"] = 1.0
    assert adapter_of(model) == alone
    lora.active_adapters = ["spare"]
    assert adapter_of(model) not in (None, alone)


def test_a_wrapped_model_is_the_model_inside() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.base_model = nn.Module()
            self.base_model.model = inner
            self.config = inner.config

    model, _ = adapted()
    assert spec_of(Wrapper(model), "x") == spec_of(model, "x")
    compiled: Any = torch.compile(tiny_model("llama-gqa"))
    assert spec_of(compiled, "x") == spec_of(tiny_model("llama-gqa"), "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_watch_sees_a_dense_change_of_any_weight_even_one_that_torch_does_not_count(
    dtype: torch.dtype,
) -> None:
    model = tiny_model("qwen3", dtype)
    watch = WeightWatch(model)
    seen = {watch.stamp()}
    assert watch.stamp() in seen
    for parameter in model.parameters():
        before = parameter._version
        parameter.data.mul_(1.25)
        assert parameter._version == before
        seen.add(watch.stamp())
    assert len(seen) == 1 + len(list(model.parameters()))


def test_a19_weights_changed_behind_an_attached_engine_are_not_answered_from_the_cache() -> None:
    import retain
    from retain.engines.transformers import attach

    model = tiny_model("llama-gqa")
    tokens = torch.arange(100)[None]
    with closing(retain.open("memory:16MiB")) as cache:
        engine = attach(model, None, cache)
        for found in (0, 96):
            engine.forward(tokens)
            assert engine.last_report.found == found
            cache.flush()
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.25)
        logits = engine.forward(tokens).logits[0, -1]
        assert engine.last_report.found == 0
        with torch.no_grad():
            assert torch.allclose(logits, model(input_ids=tokens).logits[0, -1], atol=1e-5)
