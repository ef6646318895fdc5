"""Between canonical blocks and the states of llama.cpp: which layer lies where, and the order of K's pairs.

llama.cpp rotates neighbouring pairs (0, 1), (2, 3) ... in the families of its NORM kind, whose converter has
permuted the rows of Q and K for it; canonical K is half-split, as Hugging Face's. Which families those are
is known by a table (retain.gguf), and tried at start (retain.engines.llamacpp.selftest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from retain._native import Pages
from retain.block import Block
from retain.errors import InvalidObject, UnsupportedModel
from retain.model import ModelSpec

from .state import Array, CacheForm, CacheView, Dialect, StateForm

_PARALLEL_BYTES = 8 << 20
"""Below this a restore is not worth waking another thread."""


@dataclass(frozen=True)
class Place:
    """Where a layer's numbers lie: the names of a block's arrays and the row in them, and in a state the
    cache and the row in it."""

    k: str
    v: str
    row: int
    cache: int
    index: int


@dataclass(frozen=True)
class _Plane:
    """The K, or V, of the layers of one cache that share an array of a block; valid while the state is."""

    name: str
    cache: int
    pages: Pages


class Layout:
    """The layers of one model in blocks and in states."""

    def __init__(self, spec: ModelSpec, *, window: int, dtype: str, flash: bool, interleaved: bool) -> None:
        """`window` is what llama.cpp says of its sliding layers, 0 for none; `dtype` that of its cache.

        Raises UnsupportedModel, naming the layer that cannot be kept.
        """
        self.spec = spec
        self.window = window
        self._interleaved = interleaved
        kinds = [_kind(index, layer.kind) for index, layer in enumerate(spec.layers)]
        for index, layer in enumerate(spec.layers):
            if layer.kind == "sliding" and layer.window != window:
                raise UnsupportedModel(
                    f"layer {index} has a window of {layer.window} by the model's config, and of {window} "
                    "in llama.cpp"
                )
            turned = None if layer.rope is None else layer.rope.rotary_dim
            if interleaved and turned not in (None, layer.k_dim):
                raise UnsupportedModel(
                    f"layer {index} rotates {turned} of {layer.k_dim} numbers in neighbouring pairs, "
                    "which Retain does not know to permute"
                )
        if window and "sliding" not in kinds:
            raise UnsupportedModel(
                f"llama.cpp has layers with a window of {window} where the model's config has none"
            )
        members = [[i for i, kind in enumerate(kinds) if kind == wanted] for wanted in ("full", "sliding")]
        self._members = members if window else members[:1]
        self.caches = tuple(
            CacheForm(tuple(layers), tuple(spec.layers[i].shape for i in layers), dtype, not flash)
            for layers in self._members
        )
        self.places = self._places()

    def form(self, dialect: Dialect) -> StateForm:
        return StateForm(self.caches, dialect)

    def spans(self, tokens: int) -> tuple[list[int], list[int]]:
        """First position and count of the cells that each cache has when `tokens` are restored."""
        firsts = [0, max(0, tokens - self.window)][: len(self.caches)]
        return firsts, [tokens - first for first in firsts]

    def fill(
        self,
        views: Sequence[CacheView],
        firsts: Sequence[int],
        blocks: Sequence[Block],
        lengths: Sequence[int],
        workers: ThreadPoolExecutor | None,
    ) -> None:
        """Copy blocks into a state's views, cutting off what lies before a sliding cache's first cell."""

        copies: list[Callable[[], None]] = []
        for plane in self._planes(views):
            table = np.zeros(1, np.int64)
            at = -firsts[plane.cache]
            for block, length in zip(blocks, lengths, strict=True):
                skip = max(0, -at)
                if skip < length:
                    array = block.arrays[plane.name]
                    copies.append(partial(plane.pages.scatter, array, table, at + skip, skip, length - skip))
                at += length
        if workers is not None and sum(lengths) * self.spec.token_bytes > _PARALLEL_BYTES:
            list(workers.map(lambda copy: copy(), copies))
        else:
            for copy in copies:
                copy()

    def copy_out(
        self, views: Sequence[CacheView], caches: Sequence[int], first: int, arrays: Mapping[str, Array]
    ) -> int:
        """Copy what the views of these caches hold into a block's arrays, whose first token is at position
        `first`; how many tokens. Raises InvalidObject unless all caches hold the same positions."""
        tokens = 0
        for view, cache in zip(views, caches, strict=True):
            order = np.argsort(view.positions, kind="stable")
            positions = view.positions[order]
            if tokens and positions.size != tokens:
                raise InvalidObject(f"a state has {positions.size} cells in one cache, {tokens} in another")
            tokens = int(positions.size)
            if tokens == 0:
                continue
            if not np.array_equal(positions, np.arange(positions[0], positions[0] + tokens)):
                raise InvalidObject("the positions in a state have gaps")
            start = int(positions[0]) - first
            ordered = bool((order == np.arange(tokens)).all())
            table = np.zeros(1, np.int64) if ordered else order.astype(np.int64)
            for plane in self._planes([view], [cache], 1 if not ordered else tokens):
                plane.pages.gather(arrays[plane.name], table, 0, start, tokens)
        return tokens

    def _planes(
        self, views: Sequence[CacheView], caches: Sequence[int] | None = None, page_tokens: int | None = None
    ) -> Iterator[_Plane]:
        """The K and V of views as pages of `page_tokens` cells, by default all. `caches` says which of
        the model's each view is of; by default all are there, in order."""
        for view, cache in zip(views, caches or range(len(self.caches)), strict=True):
            if view.positions.size == 0:
                continue
            members = [place for place in self.places if place.cache == cache]
            for name in dict.fromkeys(each for place in members for each in (place.k, place.v)):
                held = [place for place in members if name in (place.k, place.v)]
                arrays = [(view.k if name == place.k else view.v)[place.index] for place in held]
                heads, cells, dim = arrays[0].shape
                head, token, number = arrays[0].strides
                size = page_tokens or cells
                pages = Pages(
                    bases=[array.ctypes.data for array in arrays],
                    rows=[place.row for place in held],
                    pages=cells // size,
                    page_tokens=size,
                    heads=heads,
                    dim=dim,
                    item=arrays[0].itemsize,
                    page_stride=size * token,
                    head_stride=head,
                    token_stride=token,
                    dim_stride=number,
                    pairs=self._interleaved and name == held[0].k,
                )
                yield _Plane(name, cache, pages)

    def _places(self) -> tuple[Place, ...]:
        groups = self.spec.groups
        found: dict[int, Place] = {}
        for group in groups:
            suffix = "" if len(groups) == 1 else f".{group.index}"
            for row, layer in enumerate(group.layers):
                cache = next(number for number, members in enumerate(self._members) if layer in members)
                index = self._members[cache].index(layer)
                found[layer] = Place(f"k{suffix}", f"v{suffix}", row, cache, index)
        return tuple(found[layer] for layer in range(len(self.spec.layers)))


def pieces(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Positions first .. last in pieces that end at multiples of `most`."""
    while first < last:
        end = min(last, (first // most + 1) * most)
        yield first, end
        first = end


def _kind(index: int, kind: str) -> str:
    if kind not in ("full", "sliding"):
        raise UnsupportedModel(f"layer {index} is {kind}; of llama.cpp Retain keeps full and sliding layers")
    return kind
