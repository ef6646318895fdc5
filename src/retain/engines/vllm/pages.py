"""Copies between the pages of a worker and canonical blocks, for all layers that it holds.

`HostPages` is one pass of native code; `DevicePages` one gather or scatter a block on the accelerator and one
copy to or from pinned memory. Both agree number by number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from retain._native import Pages
from retain.codecs.base import Array
from retain.model import DTYPES, LayerGroup, layer_groups
from retain.model import LayerSpec as Layer

from .layout import LayerPages, Strides
from .tables import Table


class PagedKV(Protocol):
    """What moves blocks. `arrays` are a block's, by name; `start` is where token `position` lies in them."""

    def gather(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        """Copy `count` tokens from position `position` on out of the pages; all must be in real blocks."""

    def scatter(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        """Copy them into the pages; where a group has no block for a token, its layers get nothing."""


@dataclass(frozen=True)
class _Plane:
    """K or V of the layers that share an array and a table of blocks."""

    array: str
    group: int
    rows: tuple[int, ...]
    layers: tuple[LayerPages, ...]
    dim: int
    strides: tuple[Strides, ...]


def planes(held: Sequence[LayerPages], layers: tuple[Layer, ...]) -> list[_Plane]:
    """K and V of all layers a worker holds, together where array, group and shape of pages are the same."""
    groups = layer_groups(layers)
    first, last = held[0].index, held[-1].index
    sets: dict[tuple[int, int, object], list[tuple[int, LayerPages]]] = defaultdict(list)
    for layer in held:
        group, row = _place(groups, layer.index, first, last)
        shape = (layer.pages, layer.page_tokens, layer.heads, layer.k, layer.v)
        sets[group.index, layer.group, shape].append((row, layer))
    found = []
    for (number, table, _), members in sets.items():
        suffix = "" if len(groups) == 1 else f".{number}"
        rows = tuple(row for row, _ in members)
        chosen = tuple(layer for _, layer in members)
        found.append(_Plane(f"k{suffix}", table, rows, chosen, chosen[0].k_dim, tuple(x.k for x in chosen)))
        values = tuple(x.v for x in chosen if x.v is not None)
        if values:
            found.append(_Plane(f"v{suffix}", table, rows, chosen, chosen[0].v_dim, values))
    return found


def _place(groups: Sequence[LayerGroup], index: int, first: int, last: int) -> tuple[LayerGroup, int]:
    for group in groups:
        if index in group.layers:
            held = [layer for layer in group.layers if first <= layer <= last]
            return group, held.index(index)
    raise IndexError(f"no layer {index}")


class HostPages:
    """Pages in the host's memory."""

    def __init__(self, held: Sequence[LayerPages], layers: tuple[Layer, ...], dtype: str) -> None:
        self._tensors = [layer.cache for layer in held]  # the addresses below are valid while these live
        self._planes = [(plane, self._native(plane, DTYPES[dtype])) for plane in planes(held, layers)]

    def gather(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        for plane, native in self._planes:
            table = tables[plane.group]
            page_tokens = plane.layers[0].page_tokens
            first = position - table.first * table.block_tokens
            native.gather(arrays[plane.array], table.pages(page_tokens), first, start, count)

    def scatter(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        for plane, native in self._planes:
            table = tables[plane.group]
            pages = table.pages(plane.layers[0].page_tokens)
            for low, high in table.runs(position, position + count):
                first = low - table.first * table.block_tokens
                native.scatter(arrays[plane.array], pages, first, start + low - position, high - low)

    @staticmethod
    def _native(plane: _Plane, item: int) -> Pages:
        layer, strides = plane.layers[0], plane.strides[0]
        return Pages(
            bases=[x.cache.data_ptr() + s.offset for x, s in zip(plane.layers, plane.strides, strict=True)],
            rows=plane.rows,
            pages=layer.pages,
            page_tokens=layer.page_tokens,
            heads=layer.heads,
            dim=plane.dim,
            item=item,
            page_stride=strides.page,
            head_stride=strides.head,
            token_stride=strides.token,
            dim_stride=strides.dim,
        )


class DevicePages:
    """Pages on an accelerator, through torch: all calls order themselves on the caller's current stream.

    One index over a view of all layers is one kernel a block where the layers lie at even distances, as they
    do in vLLM's single allocation; else one a layer.
    """

    def __init__(self, held: Sequence[LayerPages], layers: tuple[Layer, ...], dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self._planes = [(plane, _views(plane, DTYPES[dtype])) for plane in planes(held, layers)]

    def gather(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        for plane, views in self._planes:
            table = tables[plane.group]
            host = self._host(arrays[plane.array])
            pages, first = self._pages(plane, table, position, count, views[0].device)
            at = 0
            for view in views:
                taken = view.index_select(1, pages).permute(
                    0, 2, 1, 3, 4
                )  # layers, heads, pages, tokens, dim
                tokens = taken.reshape(*taken.shape[:2], -1, plane.dim)[:, :, first : first + count]
                for offset, row in enumerate(plane.rows[at : at + view.shape[0]]):
                    host[row, :, start : start + count].copy_(tokens[offset], non_blocking=True)
                at += view.shape[0]

    def scatter(
        self, arrays: Mapping[str, Array], tables: Sequence[Table], position: int, start: int, count: int
    ) -> None:
        for plane, views in self._planes:
            table = tables[plane.group]
            host = self._host(arrays[plane.array])
            tokens = plane.layers[0].page_tokens
            for low, high in table.runs(position, position + count):
                pages, first = self._pages(plane, table, low, high - low, views[0].device)
                places = torch.arange(first, first + high - low, device=pages.device)
                page, token = pages[places // tokens], places % tokens
                begin = start + low - position
                at = 0
                for view in views:
                    rows = list(plane.rows[at : at + view.shape[0]])
                    part = host[rows, :, begin : begin + high - low]  # layers, heads, tokens, dim
                    value = part.to(view.device, non_blocking=True)
                    # Advanced indices on both sides of a slice come first: tokens, layers, heads, dim.
                    view[:, page, :, token] = value.permute(2, 0, 1, 3)
                    at += view.shape[0]

    def _host(self, array: Array) -> torch.Tensor:
        # torch knows no read-only tensors and warns of such arrays; where they come from, they are only read.
        open_array = np.asarray(_Unlocked(array))
        return torch.from_numpy(open_array.view(np.int16) if array.dtype == np.uint16 else open_array).view(
            self._dtype
        )

    @staticmethod
    def _pages(
        plane: _Plane, table: Table, position: int, count: int, device: torch.device
    ) -> tuple[torch.Tensor, int]:
        tokens = plane.layers[0].page_tokens
        at = position - table.first * table.block_tokens
        low, high = at // tokens, -(-(at + count) // tokens)
        pages = torch.from_numpy(np.ascontiguousarray(table.pages(tokens)[low:high]))
        return pages.to(device, non_blocking=True), at - low * tokens


class _Unlocked:
    """An array's memory without its read-only mark; keeps the array alive."""

    def __init__(self, array: Array) -> None:
        self.array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _views(plane: _Plane, item: int) -> list[torch.Tensor]:
    """The plane as `[layers, pages, heads, tokens, dim]`: one view where layers lie at even distances."""
    first = plane.layers[0]
    starts = [x.cache.data_ptr() for x in plane.layers]
    storages = {x.cache.untyped_storage().data_ptr() for x in plane.layers}
    steps = {b - a for a, b in pairwise(starts)}
    if len(storages) == 1 and len(steps) <= 1 and min(steps, default=0) >= 0:
        step = next(iter(steps), 0) // item
        return [_view(first, plane.strides[0], plane.dim, item, len(starts), step)]
    return [_view(x, s, plane.dim, item, 1, 0) for x, s in zip(plane.layers, plane.strides, strict=True)]


def _view(layer: LayerPages, strides: Strides, dim: int, item: int, count: int, step: int) -> torch.Tensor:
    return layer.cache.as_strided(
        (count, layer.pages, layer.heads, layer.page_tokens, dim),
        (step, strides.page // item, strides.head // item, strides.token // item, strides.dim // item),
        layer.cache.storage_offset() + strides.offset // item,
    )
