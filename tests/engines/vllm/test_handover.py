"""Handing over: what a prefill engine promises, and how a decode engine waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from .conftest import Engine, prompt, same

PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine], tiny_llama: Any) -> Engine:
    return engines(tiny_llama, {"tiers": ["memory:128MiB"]})


def ask(engine: Engine, ids: Sequence[int], extra: dict[str, Any], tokens: int = 1) -> Any:
    """One prompt through vLLM's own call, for what it returns beside the tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
    )
    return engine.llm.generate([{"prompt_token_ids": list(ids)}], parameters, use_tqdm=False)[0]


def promise_of(said: Any) -> dict[str, Any]:
    """Retain's part of what an answer hands over: with the rest, vLLM tells the first server's cached tokens
    instead of this one's.
    """
    return {"retain": said.kv_transfer_params["retain"]}


@pytest.mark.parametrize("length", [5, 65, 256, 257, 263, 700])
def test_a5_a_prompt_that_is_handed_over_is_kept_to_its_last_token(engine: Engine, length: int) -> None:
    ids = prompt(length, 70 + length)
    said = ask(engine, ids, PREFILL)
    assert said.kv_transfer_params["do_remote_prefill"] is True
    assert promise_of(said) == {"retain": {"tokens": length}}
    engine.settle()
    went_on = ask(engine, ids, {"kv_transfer_params": promise_of(said)}, 4)
    # A tail of less than 16 tokens is not looked for.
    assert went_on.num_cached_tokens == (
        length - 1 if (length - 1) % 256 >= 16 else (length - 1) // 256 * 256
    )


def test_nothing_is_promised_to_who_did_not_ask(engine: Engine) -> None:
    assert ask(engine, prompt(300, 80), {}).kv_transfer_params is None


def test_promised_tokens_that_come_late_are_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(700, 81)
    store, late = engine.worker._store, threading.Event()

    def slowly(*arguments: Any) -> Any:
        assert late.wait(30)
        return store(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, "_store", slowly)
        promise = promise_of(ask(engine, ids, PREFILL))
        threading.Timer(0.5, late.set).start()
        began = time.monotonic()
        said = ask(engine, ids, {"kv_transfer_params": promise}, 4)
    assert said.num_cached_tokens == 699
    assert time.monotonic() - began < 2.0


def test_promised_tokens_that_never_come_are_computed(engine: Engine) -> None:
    ids = prompt(300, 82)
    wanted = engine.ask(ids)[0]
    engine.cache.clear()
    began = time.monotonic()
    said = engine.ask(ids, extra_args={"kv_transfer_params": {"retain": {"tokens": 300}}})[0]
    assert same(said, wanted)
    assert said.cached == 0
    assert 1.5 < time.monotonic() - began < 20


@pytest.mark.parametrize(
    "params", [{"retain": 7}, {"retain": {"tokens": "many"}}, {"retain": {"tokens": -1}}]
)
def test_a_promise_that_is_none_changes_nothing(engine: Engine, params: dict[str, Any]) -> None:
    began = time.monotonic()
    assert ask(engine, prompt(90, 83), {"kv_transfer_params": params}).num_cached_tokens in (0, 80)
    assert time.monotonic() - began < 1.5
