"""Copies between an engine's pages and canonical arrays, against the same copies written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain._native import Pages

LAYERS, HEADS, PAGES, TOKENS = 3, 2, 7, 16
Array = npt.NDArray[Any]


def layout(cache: Array, axes: str, dim: int, offset: int = 0, *, pairs: bool = False) -> tuple[Pages, Array]:
    """The pages of a cache whose axes are named l, b, h, n, c, and its view [l, b, h, n, dim]."""
    order = [axes.index(name) for name in "lbhnc"]
    view = cache.transpose(order)[..., offset : offset + dim]
    strides = view.strides
    base = cache.ctypes.data + offset * strides[4]
    pages = Pages(
        bases=[base + layer * strides[0] for layer in range(LAYERS)],
        rows=list(range(LAYERS)),
        pages=PAGES,
        page_tokens=TOKENS,
        heads=HEADS,
        dim=dim,
        item=cache.itemsize,
        page_stride=strides[1],
        head_stride=strides[2],
        token_stride=strides[3],
        dim_stride=strides[4],
        pairs=pairs,
    )
    return pages, view


def read(view: Array, table: Array, first: int, count: int) -> Array:
    tokens = np.concatenate([view[:, page] for page in table], axis=2)
    return tokens[:, :, first : first + count]


ORDERS = ("lbhnc", "lbnhc", "lhbnc", "blhnc", "blnhc", "bhlnc", "lbhcn", "lbchn")


@settings(max_examples=60, deadline=None)
@given(
    axes=st.sampled_from(ORDERS),
    item=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([1, 8, 20, 64]),
    first=st.integers(0, 40),
    count=st.integers(0, 48),
    start=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_every_order_of_axes_is_read_and_written_as_numpy_does(
    axes: str, item: int, dim: int, first: int, count: int, start: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sizes = {"l": LAYERS, "b": PAGES, "h": HEADS, "n": TOKENS, "c": 2 * dim}
    dtype = np.dtype(f"u{item}")
    cache = random.integers(0, 200, [sizes[name] for name in axes]).astype(dtype)
    table = random.permutation(PAGES)[:4].astype(np.int64)
    count = min(count, 4 * TOKENS - first)
    for offset in (0, dim):
        pages, view = layout(cache, axes, dim, offset)
        array = np.zeros((LAYERS, HEADS, start + count + 3, dim), dtype)
        pages.gather(array, table, first, start, count)
        expected = np.zeros_like(array)
        expected[:, :, start : start + count] = read(view, table, first, count)
        assert np.array_equal(array, expected)

        new = random.integers(0, 200, array.shape).astype(dtype)
        wanted = cache.copy()
        changed = layout(wanted, axes, dim, offset)[1]
        for token in range(count):
            page, at = divmod(first + token, TOKENS)
            changed[:, table[page], :, at] = new[:, :, start + token]
        pages.scatter(new, table, first, start, count)
        assert np.array_equal(cache, wanted)


@settings(max_examples=60, deadline=None)
@given(
    axes=st.sampled_from([axes for axes in ORDERS if axes.endswith("c")]),
    item=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([2, 6, 16, 32, 50, 64, 80, 256]),
    first=st.integers(0, 20),
    count=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_halves_become_neighbouring_pairs_and_halves_again(
    axes: str, item: int, dim: int, first: int, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    sizes = {"l": LAYERS, "b": PAGES, "h": HEADS, "n": TOKENS, "c": 2 * dim}
    dtype = np.dtype(f"u{item}")
    cache = random.integers(0, np.iinfo(dtype).max, [sizes[name] for name in axes], dtype, endpoint=True)
    table = random.permutation(PAGES)[:4].astype(np.int64)
    pages, view = layout(cache, axes, dim, dim, pairs=True)
    array = random.integers(0, np.iinfo(dtype).max, (LAYERS, HEADS, count, dim), dtype, endpoint=True)
    pages.scatter(array, table, first, 0, count)
    found = read(view, table, first, count)
    assert np.array_equal(found[..., 0::2], array[..., : dim // 2])
    assert np.array_equal(found[..., 1::2], array[..., dim // 2 :])
    again = np.zeros_like(array)
    pages.gather(again, table, first, 0, count)
    assert np.array_equal(again, array)


def test_pairs_of_an_odd_number_or_of_numbers_that_lie_apart_are_refused() -> None:
    for axes, dim in (("lbhnc", 7), ("lbhcn", 8)):
        cache = np.zeros(
            [{"l": LAYERS, "b": PAGES, "h": HEADS, "n": TOKENS, "c": dim}[a] for a in axes], "u2"
        )
        with pytest.raises(ValueError, match="pairs"):
            layout(cache, axes, dim, pairs=True)


def test_what_does_not_fit_is_refused_and_nothing_is_copied() -> None:
    cache = np.zeros((LAYERS, PAGES, HEADS, TOKENS, 8), np.float32)
    pages, _ = layout(cache, "lbhnc", 8)
    array = np.ones((LAYERS, HEADS, 32, 8), np.float32)
    table = np.array([1, 2], np.int64)
    for bad in (
        (array, table, 0, 0, 33),  # beyond the table
        (array, table, 0, 17, 16),  # beyond the array
        (array, np.array([1, PAGES], np.int64), 0, 0, 32),
        (array, np.array([-1, 2], np.int64), 0, 0, 32),
        (array[:2], table, 0, 0, 32),
        (array[:, :1], table, 0, 0, 32),
        (array[..., :4], table, 0, 0, 32),
        (array.astype(np.uint16), table, 0, 0, 32),
        (np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), table, 0, 0, 32),
        (array, table, 2**63, 0, 2**63),
    ):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            pages.scatter(*bad)
    assert not cache.any()
    with pytest.raises((ValueError, TypeError)):
        pages.gather(np.broadcast_to(array, array.shape), table, 0, 0, 32)  # not writable


def test_a_page_beyond_the_range_may_be_anything() -> None:
    cache = np.arange(LAYERS * PAGES * HEADS * TOKENS * 4, dtype=np.uint16).reshape(
        LAYERS, PAGES, HEADS, TOKENS, 4
    )
    pages, view = layout(cache, "lbhnc", 4)
    array = np.zeros((LAYERS, HEADS, 16, 4), np.uint16)
    pages.gather(array, np.array([99, 3, -5], np.int64), TOKENS, 0, 16)
    assert np.array_equal(array, view[:, 3])
