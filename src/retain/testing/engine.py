"""The conformance suite of engine adapters: subclass `EngineConformance`, attach your engine, run pytest.

    from retain.testing.engine import EngineConformance

    class TestMyEngine(EngineConformance):
        tolerance = 1e-4

        def attach(self, cache):
            return MySubject(my_engine.attach(model, cache))

A subject answers the few questions of `Subject`. Run the suite once for every shape of KV that the adapter
keeps: grouped and single KV heads, odd head sizes, one layer, sliding windows, every dtype. It needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from retain.cache import Cache, open_cache
from retain.identity import BLOCK_TOKENS, TAIL_TOKENS

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Seen:
    """What the model said after a prompt: logits `[vocabulary]`; and how many tokens came from the cache."""

    logits: Logits
    reused: int


class Subject(Protocol):
    """An engine that is attached to a cache."""

    def read(self, tokens: Sequence[int], salt: str | None = None) -> Seen:
        """Prefill a prompt with the cache, and wait until what was computed is kept."""

    def answer(self, tokens: Sequence[int], count: int, cancelled: Callable[[], bool]) -> list[int]:
        """The greedy answer, and wait until what was computed is kept."""

    def close(self) -> None:
        """Let the engine go; the cache stays open."""


class EngineConformance:
    """What every adapter must do. Override `attach`; set the attributes where the defaults do not fit."""

    vocabulary = 300
    """Token ids are below this."""

    tolerance = 1e-4
    """How far logits may lie from those of a prompt computed whole: the engine's own noise between two ways
    of computing the same."""

    longest = 2 * BLOCK_TOKENS + 2 * TAIL_TOKENS
    """The longest prompt of the suite, in tokens."""

    memory = 256 << 20
    """Bytes of the cache that the suite opens."""

    def attach(self, cache: Cache) -> Subject:
        """The engine, attached to `cache`."""
        raise NotImplementedError

    # helpers of the tests, which a subclass leaves as they are

    @contextmanager
    def subject(self, capacity: int | None = None) -> Iterator[tuple[Subject, Cache]]:
        """An engine on a cache of its own, which loads whatever it has."""
        with open_cache(f"memory:{capacity or self.memory}") as cache:
            cache.planner.best_prefix = lambda spec, blocks, total: len(blocks)  # type: ignore[method-assign]
            engine = self.attach(cache)
            try:
                yield engine, cache
            finally:
                engine.close()

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids."""
        return [int(each) for each in np.random.default_rng(seed).integers(2, self.vocabulary, length)]

    def same(self, a: Logits, b: Logits) -> None:
        far = float(np.abs(a.astype(np.float64) - b).max())
        assert far <= self.tolerance, f"logits differ by {far:.3g}, more than {self.tolerance:.3g}"

    # the suite

    def test_a24_a_prompt_read_again_is_reused_and_continues_as_computed_at_every_boundary(self) -> None:
        with self.subject() as (engine, cache):
            for seed, length in enumerate(boundaries(self.longest)):
                tokens = self.prompt(length, seed)
                cold = engine.read(tokens)
                assert cold.reused == 0
                warm = engine.read(tokens)
                # The last token is computed in any case, for its logits.
                wanted = usable(min(length - 1, length // TAIL_TOKENS * TAIL_TOKENS))
                assert warm.reused == wanted, f"{warm.reused} of {length} tokens reused, {wanted} are kept"
                self.same(cold.logits, warm.logits)
            assert not cache.stats().failures

    def test_a_prompt_that_goes_on_from_a_kept_one_takes_its_beginning_and_no_more(self) -> None:
        with self.subject() as (engine, _):
            first = self.prompt(self.longest, 90)
            engine.read(first)
            for common in (TAIL_TOKENS - 1, TAIL_TOKENS, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 17):
                other = [*first[:common], *((token + 1) % self.vocabulary for token in first[common:])]
                found = engine.read(other, salt=None)
                assert found.reused >= usable(common)
                assert found.reused <= common
                self.same(found.logits, self._alone(other))

    def test_a20_another_salt_finds_nothing(self) -> None:
        with self.subject() as (engine, _):
            tokens = self.prompt(BLOCK_TOKENS + 40, 91)
            engine.read(tokens, salt="one")
            assert engine.read(tokens, salt="two").reused == 0
            assert engine.read(tokens, salt="one").reused > 0

    def test_generated_tokens_are_kept_and_continue(self) -> None:
        with self.subject() as (engine, _):
            tokens = self.prompt(BLOCK_TOKENS - 8, 92)
            answer = engine.answer(tokens, 24, lambda: False)
            assert len(answer) == 24
            again = engine.read([*tokens, *answer])
            assert again.reused >= BLOCK_TOKENS
            self.same(again.logits, self._alone([*tokens, *answer]))

    def test_an_answer_is_the_same_with_and_without_the_cache(self) -> None:
        tokens = self.prompt(BLOCK_TOKENS + 33, 93)
        with self.subject() as (engine, _):
            cold = engine.answer(tokens, 8, lambda: False)
            warm = engine.answer(tokens, 8, lambda: False)
        assert cold == warm

    def test_an_aborted_request_leaves_nothing_wrong_behind(self) -> None:
        with self.subject() as (engine, cache):
            tokens = self.prompt(self.longest, 94)
            asked = 0

            def cancelled() -> bool:
                nonlocal asked
                asked += 1
                return asked > 3

            engine.answer(tokens, 4, cancelled)
            found = engine.read(tokens)
            self.same(found.logits, self._alone(tokens))
            stats = cache.stats()
            assert stats.tiers["memory"].leased == 0
            assert not stats.failures

    def test_what_was_evicted_in_between_is_computed_again(self) -> None:
        size = self._prompt_bytes()
        with self.subject(2 * size) as (engine, cache):
            prompts = [self.prompt(self.longest, 100 + seed) for seed in range(4)]
            fresh = [engine.read(tokens).logits for tokens in prompts]
            for tokens, wanted in zip(prompts, fresh, strict=True):
                self.same(engine.read(tokens).logits, wanted)
            assert cache.stats().counters["evicted_objects"] > 0
            assert cache.stats().tiers["memory"].leased == 0

    def test_two_engines_on_one_cache_use_each_others_kv(self) -> None:
        with self.subject() as (engine, cache):
            tokens = self.prompt(BLOCK_TOKENS + 50, 95)
            wanted = engine.read(tokens)
            other = self.attach(cache)
            try:
                found = other.read(tokens)
            finally:
                other.close()
            assert found.reused == usable(len(tokens) // TAIL_TOKENS * TAIL_TOKENS)
            self.same(found.logits, wanted.logits)

    def _alone(self, tokens: Sequence[int]) -> Logits:
        """What the model says when nothing is kept."""
        with self.subject() as (engine, _):
            return engine.read(tokens).logits

    def _prompt_bytes(self) -> int:
        """What a prompt of `longest` takes in the cache."""
        with self.subject() as (engine, cache):
            engine.read(self.prompt(self.longest, 99))
            return cache.stats().tiers["memory"].bytes


def boundaries(longest: int) -> list[int]:
    """Lengths around every place where something begins or ends: tails, blocks, and the shortest prompts."""
    around = [
        edge + step
        for edge in (TAIL_TOKENS, BLOCK_TOKENS, 2 * BLOCK_TOKENS)
        for step in (-TAIL_TOKENS - 1, -TAIL_TOKENS, -1, 0, 1, TAIL_TOKENS, TAIL_TOKENS + 1)
    ]
    return sorted({1, 2, *(length for length in around if 1 <= length <= longest)})


def usable(tokens: int) -> int:
    """How much of so many kept tokens is reused: whole blocks, and of the next at least a tail's tokens."""
    return tokens if tokens % BLOCK_TOKENS >= TAIL_TOKENS else tokens // BLOCK_TOKENS * BLOCK_TOKENS
