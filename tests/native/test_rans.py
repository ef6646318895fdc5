"""The ladder's entropy coder: equal bytes on every path, those of a plain reference, no trust in streams."""

from __future__ import annotations

import contextlib
import hashlib

import constriction
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain._native import LadderTables, rans_paths
from retain.codecs.ladder.learn import FIRST, Counts, coarser
from retain.codecs.ladder.standard import standard_tables

LANES, BITS, LOW = 32, 12, 1 << 16
TOTAL = 1 << BITS
CLASSES = 40


class Reference:
    """Interleaved rANS as docs/codecs.md describes it, one symbol after the other."""

    def __init__(self) -> None:
        self.symbols: list[tuple[int, int, int]] = []

    def put(self, lane: int, start: int, frequency: int) -> None:
        self.symbols.append((lane, start, frequency))

    def finish(self, escapes: list[int]) -> bytes:
        state, words = [LOW] * LANES, []
        for lane, start, frequency in reversed(self.symbols):
            if state[lane] >= frequency << (32 - BITS):
                words.append(state[lane] & 0xFFFF)
                state[lane] >>= 16
            state[lane] = (state[lane] // frequency << BITS) + state[lane] % frequency + start
        head = np.array([len(escapes)], "<u4").tobytes() + np.array(escapes, "<i2").tobytes()
        return head + np.array(state, "<u4").tobytes() + np.array(words[::-1], "<u2").tobytes()


def reference(tables, numbers, classes, expected, steps, energy, level) -> list[bytes]:
    frequencies = tables.frequencies.astype(int)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    shift = steps.astype(int) + energy
    streams = []
    at = numbers.astype(np.int32)
    for depth in range(level, 0, -1):
        below = coarser(at)
        out = Reference()
        for row, own in enumerate(classes):
            if own < tables.first[depth]:
                continue
            for t, number in enumerate(at[row]):
                known = int(below[row, t])
                digit = int(number) - 3 * known
                place = min(max(int(own) + shift[t], tables.first[depth]), CLASSES - 1)
                low, high = tables.splits[depth - 1, place, min(abs(known), 3)].astype(int)
                bounds = (0, low, high, TOTAL)
                part = (-digit if known < 0 else digit) + 1
                out.put(t % LANES, bounds[part], bounds[part + 1] - bounds[part])
        streams.insert(0, out.finish([]))
        at = below
    out, escapes = Reference(), []
    sides = [(40, steps.astype(int)), (41, energy.astype(int)), (42, classes.astype(int) - expected)]
    for table, row in sides:
        for i, value in enumerate(row):
            out.put(i % LANES, int(starts[table, value + 63]), int(frequencies[table, value + 63]))
    for row, own in enumerate(classes):
        if own < tables.first[0]:
            continue
        for t, number in enumerate(at[row]):
            place = min(max(int(own) + shift[t], tables.first[0]), CLASSES - 1)
            symbol = int(number) + 63
            if not 0 <= symbol < 127 or frequencies[place, symbol] == 0:
                symbol = 127
                escapes.append(int(number))
            out.put(t % LANES, int(starts[place, symbol]), int(frequencies[place, symbol]))
    return [out.finish(escapes), *streams]


def part_like(seed: int, components: int, tokens: int, level: int = 3, size: float = 20.0):
    random = np.random.default_rng(seed)
    sizes = size * (1 + np.arange(components)) ** -1.0
    numbers = np.rint(random.laplace(size=(components, tokens)) * sizes[:, None] * 3**level / 3).astype(
        np.int16
    )
    if components > 2:
        numbers[0, 0] = 1213 * 3**level
        numbers[-1] = 0
    steps = random.integers(-6, 10, tokens).astype(np.int8)
    energy = random.integers(-4, 5, tokens).astype(np.int8)
    classes = random.integers(FIRST[0], CLASSES, components).astype(np.uint8)
    quiet = ~numbers.any(axis=1)
    classes[quiet] = random.integers(0, FIRST[level] + 1, quiet.sum())
    expected = random.integers(0, CLASSES, components).astype(np.uint8)
    return numbers, classes, expected, steps, energy


def learnt_tables():
    counts = Counts()
    counts.sides += 1
    return counts.tables()


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(("components", "tokens"), [(1, 1), (3, 5), (7, 32), (40, 37), (33, 64), (5, 256)])
def test_every_path_writes_the_bytes_of_the_reference_and_reads_them(
    components: int, tokens: int, level: int
) -> None:
    tables = learnt_tables()
    numbers, classes, expected, steps, energy = part_like(components, components, tokens, level)
    wanted = reference(tables, numbers, classes, expected, steps, energy, level)
    for path in rans_paths():
        coder = LadderTables(tables.frequencies, tables.splits, tables.first, path)
        assert coder.path == path
        assert coder.encode(numbers.copy(), classes, expected, steps, energy, level) == wanted, path
        out = (np.empty_like(numbers), np.empty_like(classes), np.empty_like(steps), np.empty_like(energy))
        rows = [np.frombuffer(stream, np.uint8) for stream in wanted]
        coder.decode(rows, out[0], out[1], expected, out[2], out[3])
        for found, given_ in zip(out, (numbers, classes, steps, energy), strict=True):
            assert np.array_equal(found, given_), path


def test_it_takes_hardly_more_room_than_another_coder_with_the_same_model() -> None:
    tables = standard_tables()
    random = np.random.default_rng(0)
    own = 26
    numbers = np.clip(np.rint(random.logistic(scale=1.4, size=(64, 256))), -60, 60).astype(np.int16)
    classes, expected = np.full(64, own, np.uint8), np.full(64, own, np.uint8)
    zeros = np.zeros(256, np.int8)
    (stream,) = tables.native.encode(numbers.copy(), classes, expected, zeros, zeros, 0)
    model = constriction.stream.model.Categorical(
        (tables.frequencies[own].astype(np.float32) + 1e-6) / 4096, perfect=False
    )
    other = constriction.stream.stack.AnsCoder()
    other.encode_reverse(numbers.ravel().astype(np.int32) + 63, model)
    words = other.get_compressed()
    assert np.array_equal(
        constriction.stream.stack.AnsCoder(words).decode(model, numbers.size), numbers.ravel() + 63
    )
    sides = (256 + 256 + 64) * 2 / 8  # token and component classes at under 2 bits each
    assert len(stream) <= 4 * len(words) * 1.002 + 4 * LANES + sides


@pytest.mark.parametrize("path", rans_paths())
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_stream_makes_it_read_or_write_elsewhere(path: str, data: st.DataObject) -> None:
    tables = learnt_tables()
    coder = LadderTables(tables.frequencies, tables.splits, tables.first, path)
    components, tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 70))
    numbers, classes, expected, steps, energy = part_like(data.draw(st.integers(0, 9)), components, tokens)
    streams = [bytearray(each) for each in coder.encode(numbers, classes, expected, steps, energy, 3)]
    for stream in streams:
        for _ in range(data.draw(st.integers(0, 3))):
            stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
        del stream[data.draw(st.integers(0, len(stream))) if data.draw(st.booleans()) else len(stream) :]
    rows = [np.frombuffer(bytes(stream), np.uint8) for stream in streams]
    guarded = np.full((components + 2, tokens), 12345, np.int16)
    out = np.empty_like(classes), np.empty_like(steps), np.empty_like(energy)
    with contextlib.suppress(ValueError):
        coder.decode(rows, guarded[1:-1], out[0], expected, out[1], out[2])
    assert (guarded[[0, -1]] == 12345).all()


def test_tables_that_cannot_be_coded_with_are_refused() -> None:
    good = learnt_tables()

    def made(**changes: np.ndarray) -> LadderTables:
        parts = {"frequencies": good.frequencies, "splits": good.splits, "first": good.first} | changes
        return LadderTables(parts["frequencies"], parts["splits"], parts["first"])

    for row, symbol, change in ((0, 63, 1), (20, 63, -1), (42, 63, 1)):
        bad = good.frequencies.copy()
        bad[row, symbol] += np.int16(change).astype(np.uint16)
        with pytest.raises(ValueError, match="table"):
            made(frequencies=bad)
    whole = good.frequencies.copy()
    whole[20] = 0
    whole[20, 63] = 4096
    with pytest.raises(ValueError, match="4096"):
        made(frequencies=whole)
    for low, high in ((0, 9), (9, 9), (9, 4096), (65535, 3)):
        bad = good.splits.copy()
        bad[1, 7, 2] = (low, high)
        with pytest.raises(ValueError, match="split"):
            made(splits=bad)
    with pytest.raises(ValueError, match="first"):
        made(first=np.array([3, 4, 5, 6], np.uint8))
    with pytest.raises(ValueError, match="first"):
        made(first=np.array([40, 4, 3, 2], np.uint8))
    with pytest.raises(ValueError, match="shapes"):
        made(frequencies=good.frequencies[:-1])
    with pytest.raises(ValueError, match="path"):
        LadderTables(good.frequencies, good.splits, good.first, "mmx")


def test_numbers_that_have_no_code_are_refused() -> None:
    coder = learnt_tables().native
    numbers, classes, expected, steps, energy = part_like(0, 4, 8, 0)
    big = numbers.copy()
    big[1, 1] = 1214
    with pytest.raises(ValueError, match="1213"):
        coder.encode(big, classes, expected, steps, energy, 0)
    loud = numbers.copy()
    loud[1, 1] = 5
    with pytest.raises(ValueError, match="zeros"):
        coder.encode(loud, np.zeros_like(classes), expected, steps, energy, 0)
    with pytest.raises(ValueError, match="class"):
        coder.encode(numbers, np.full_like(classes, 40), expected, steps, energy, 0)
    with pytest.raises(ValueError, match="level"):
        coder.encode(numbers, classes, expected, steps, energy, 4)


def test_the_standard_tables_are_the_same_on_every_machine() -> None:
    tables = standard_tables()
    digest = hashlib.sha256(tables.frequencies.tobytes() + tables.splits.tobytes() + tables.first.tobytes())
    assert digest.hexdigest()[:16] == "ae9ec6fff3e0e9df"
