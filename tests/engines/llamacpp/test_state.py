"""The bytes of llama.cpp's states: what is written is read back, and nothing foreign is taken for a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.block import Block
from retain.cache import Cache, Query
from retain.engines.llamacpp import Settings, attach
from retain.engines.llamacpp.host import Host
from retain.engines.llamacpp.native import NativeContext
from retain.engines.llamacpp.state import DIALECTS, CacheForm, StateForm, file_version
from retain.errors import InvalidObject, UnsupportedModel
from retain.models import find

SMALL = Settings(threads=1, context=1024, flash=False, dtype="float32")
FAST = settings(max_examples=40, deadline=None)


@st.composite
def forms(draw: st.DrawFn) -> tuple[StateForm, list[int], list[int]]:
    dialect = draw(st.sampled_from(sorted(DIALECTS)))
    dtype, transposed = draw(st.sampled_from(["float32", "float16"])), draw(st.booleans())
    caches, counts, firsts = [], [], []
    for _ in range(draw(st.integers(1, 2))):
        shapes = draw(
            st.lists(
                st.tuples(st.integers(1, 3), st.sampled_from([2, 6]), st.sampled_from([0, 4])), max_size=3
            )
        )
        caches.append(CacheForm(tuple(range(len(shapes))), tuple(shapes), dtype, transposed))
        counts.append(draw(st.integers(0, 5)))
        firsts.append(draw(st.integers(0, 100)))
    return StateForm(tuple(caches), DIALECTS[dialect]), firsts, counts


@FAST
@given(forms(), st.integers(0, 2**32 - 1))
def test_a_state_is_read_back_as_it_was_written_in_both_dialects(
    case: tuple[StateForm, list[int], list[int]], seed: int
) -> None:
    form, firsts, counts = case
    buffer = np.zeros(form.size(counts), np.uint8)
    random = np.random.default_rng(seed)
    written = form.write(buffer, firsts, counts)
    for view in written:
        for array in (*view.k, *view.v):
            array[...] = random.standard_normal(array.shape)
    for mine, theirs, first, count in zip(written, form.read(buffer.copy()), firsts, counts, strict=True):
        assert theirs.positions.tolist() == list(range(first, first + count))
        for a, b in zip((*mine.k, *mine.v), (*theirs.k, *theirs.v), strict=True):
            assert np.array_equal(a, b)


@FAST
@given(forms(), st.data())
def test_a24_a_state_that_is_cut_longer_or_of_another_form_is_refused(
    case: tuple[StateForm, list[int], list[int]], data: st.DataObject
) -> None:
    form, firsts, counts = case
    buffer = np.zeros(form.size(counts), np.uint8)
    form.write(buffer, firsts, counts)
    with pytest.raises(InvalidObject):
        form.read(buffer[: data.draw(st.integers(0, buffer.size - 1))])
    with pytest.raises(InvalidObject):
        form.read(np.concatenate([buffer, np.zeros(data.draw(st.integers(1, 9)), np.uint8)]))
    if any(count and cache.layers for count, cache in zip(counts, form.caches, strict=True)):
        other = replace(
            form, caches=tuple(replace(each, transposed=not each.transposed) for each in form.caches)
        )
        with pytest.raises(InvalidObject):
            other.read(buffer)


def test_a_file_version_that_is_not_known_is_refused_with_its_number() -> None:
    assert file_version((0x67677371).to_bytes(4, "little") + (4).to_bytes(4, "little")) == 4
    with pytest.raises(UnsupportedModel, match="version 9"):
        file_version((0x67677371).to_bytes(4, "little") + (9).to_bytes(4, "little"))


@pytest.mark.engine
def test_quantised_caches_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match=r"'q8_0'.*rotated"):
        Settings(dtype="q8_0")


@pytest.mark.engine
def test_a25_a_block_that_does_not_fit_is_a_miss_and_llama_cpp_is_not_asked(
    gguf: Callable[[str], Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(str(gguf("llama-gqa")), cache, SMALL) as engine:
        tokens = np.arange(2, 282)
        cold = engine.forward(tokens)
        assert engine.settle()
        blocks = _blocks(cache, engine.host, tokens)
        asked: list[int] = []
        monkeypatch.setattr(NativeContext, "set_state", lambda *a: asked.append(1))
        for wrong in (
            [(blocks[1], 16)],  # does not begin at token 0
            [(replace_header(blocks[0], layers=blocks[0].header.layers[:-1]), 256)],
            [(blocks[0], 257)],
            [(blocks[0], 256)] * 5,
        ):
            with engine.host.sequence(lambda: False) as sequence, pytest.raises(InvalidObject):
                engine.host.restore(sequence, [b for b, _ in wrong], [n for _, n in wrong])
        assert not asked
        monkeypatch.undo()
        monkeypatch.setattr(NativeContext, "set_state", lambda self, number, state: False)
        warm = engine.forward(tokens)  # llama.cpp refuses: computed, counted, and the same
        assert warm.report.reused_tokens == 0
        assert np.array_equal(warm.logits, cold.logits)
        assert cache.stats().failures == {"kept KV could not be used": 1}


@pytest.mark.engine
def test_several_sequences_do_not_disturb_each_other(gguf: Callable[[str], Path], cache: Cache) -> None:
    several = replace(SMALL, sequences=3)
    with attach(str(gguf("gemma3-window-32")), cache, several) as engine:
        prompts = [[(7 * i + j) % 300 for j in range(60 + 20 * i)] for i in range(3)]
        alone = [[step.token for step in engine.stream(p, stop=())] for p in prompts]
        assert engine.settle()
        streams = [engine.stream(p, stop=()) for p in prompts]
        mixed = [[next(stream).token] for stream in streams]  # all three hold a sequence now
        for _ in range(15):
            for found, stream in zip(mixed, streams, strict=True):
                found.append(next(stream).token)
        assert mixed == alone
        for stream in streams:
            stream.close()


@pytest.mark.engine
def test_a_wrong_order_of_pairs_is_found_at_start(
    gguf: Callable[[str], Path], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retain.gguf.GgufFile.interleaved", False)
    with pytest.raises(UnsupportedModel, match="K of layer 0"):
        attach(str(gguf("llama-gqa")), cache, SMALL)


def _blocks(cache: Cache, host: Host, tokens: np.ndarray) -> list[Block]:
    from retain.identity import chain, space_of

    keys = chain(space_of(host.spec.kin), tokens)
    with cache.load(cache.lookup(Query(keys, host.spec))) as loaded:
        return [_copied(block) for block in loaded.blocks]


def _copied(block: Block) -> Block:
    return Block(block.header, block.tokens.copy(), {n: a.copy() for n, a in block.arrays.items()})


def replace_header(block: Block, **changes: object) -> Block:
    return Block(replace(block.header, **changes), block.tokens, block.arrays)  # type: ignore[arg-type]


@pytest.mark.engine
def test_the_library_in_use_writes_states_of_a_known_version(gguf: Callable[[str], Path]) -> None:
    host = Host(find(str(gguf("llama-gqa"))), SMALL)
    try:
        assert host.dialect in DIALECTS.values()
    finally:
        host.close()
