"""Requests that take no part: their results are those without a connector, and nothing of them is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import VOCABULARY, Engine, prompt

RETAIN = {"tiers": ["memory:64MiB"]}


@pytest.fixture(scope="module")
def with_tokenizer(tiny_llama: Path) -> Path:
    """The tiny Llama with a tokenizer beside it, without which vLLM pools nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words: Any = models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0")
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=Tokenizer(words), eos_token="w1", pad_token="w2").save_pretrained(tiny_llama)
    return tiny_llama


def test_embeddings_of_whole_prompts_are_computed_whole(
    launch: Callable[..., Engine], with_tokenizer: Path
) -> None:
    def pooled(retain: dict[str, Any] | None) -> list[float]:
        engine = launch(with_tokenizer, retain, runner="pooling", skip_tokenizer_init=False)
        found: list[list[float]] = []
        for _ in range(2):
            (output,) = engine.llm.encode(
                [{"prompt_token_ids": prompt(400, 50)}], pooling_task="embed", use_tqdm=False
            )
            found.append(output.outputs.data.tolist())
        assert found[0] == pytest.approx(found[1], abs=1e-5)
        if retain is not None:
            engine.settle()
            assert engine.cache.stats().counters["stored_blocks"] == 0
            assert engine.cache.stats().counters["lookups"] == 0
            assert not engine.cache.stats().failures
        engine.close()
        return found[1]

    assert pooled(RETAIN) == pytest.approx(pooled(None), abs=1e-5)


def test_prompts_given_as_embeddings_are_computed_and_neither_kept_nor_found(
    launch: Callable[..., Engine], tiny_llama: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from vllm import SamplingParams

    table = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    text = prompt(400, 51)
    parameters = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = launch(tiny_llama, RETAIN, enable_prompt_embeds=True)

    def ask(embeddings: torch.Tensor) -> tuple[list[int], int]:
        (output,) = engine.llm.generate([{"prompt_embeds": embeddings}], parameters, use_tqdm=False)
        engine.settle()
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    computed = [ask(table[text]) for _ in range(2)]
    assert engine.cache.stats().counters["stored_blocks"] == 0
    given = engine.ask(text)[0]  # the same as token ids
    assert computed == [(list(given.tokens), 0)] * 2
    assert given.cached == 0
    assert ask(table[text]) == (list(given.tokens), 0)
    other = ask(table[prompt(400, 52)])
    assert other[1] == 0
    assert other[0] != list(given.tokens)
    assert engine.ask(text)[0].cached == 399
