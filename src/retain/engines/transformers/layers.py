"""Cache layers that keep every row they were given: transformers' dynamic layers, written in place.

`DynamicLayer.update` concatenates, which copies a layer's whole KV at every step. The layers here write
behind what they hold, in a buffer with spare room, and hand out views. Rows below a layer's length never
change afterwards, so another thread may copy them while decoding goes on. Attention over the strided views
was measured bit-equal to the concatenated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from retain.errors import UnsupportedModel

Array = npt.NDArray[Any]
Watch = Callable[[int], None]
"""Called with a layer's index when the layer is updated; what it raises ends the forward pass."""

ROOM_TOKENS = 256
"""Least spare rows of a new buffer."""


class BufferPool:
    """Buffers of finished requests, kept for the next one: touching fresh pages cost 2 microseconds each,
    which at 188 MB (4,096 tokens of SmolLM2) is more time than the copy itself. Holds at most what the
    largest request gave back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._held = 0
        self._most = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferPool:
        return self  # a copied cache takes its buffers from the same place

    @property
    def held_bytes(self) -> int:
        return self._held

    def take(self, size: int, device: torch.device) -> Tensor:
        """A flat uint8 tensor of at least `size` bytes."""
        if device.type == "cpu":
            with self._lock:
                fitting = [b for b in self._free if size <= b.numel() <= 2 * size + (1 << 20)]
                if fitting:
                    best = min(fitting, key=Tensor.numel)
                    self._free = [b for b in self._free if b is not best]
                    self._held -= best.numel()
                    return best
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=device)

    def give(self, buffers: list[Tensor]) -> None:
        """Take back the buffers of one request. Nobody may use them any more."""
        buffers = [b for b in buffers if b.device.type == "cpu"]
        with self._lock:
            self._most = max(self._most, sum(b.numel() for b in buffers))
            self._free = buffers + self._free
            self._held = 0
            for count, buffer in enumerate(self._free):
                if self._held + buffer.numel() > self._most:
                    self._free = self._free[:count]
                    break
                self._held += buffer.numel()


class Rows:
    """K and V of one layer, append-only: position p lies in row p - origin of `[batch, heads, rows,
    head_dim]`."""

    def __init__(self, pool: BufferPool, like_k: Tensor, like_v: Tensor, origin: int, capacity: int) -> None:
        self.origin = origin
        self.stop = origin
        self._pool = pool
        self._flat_k, self.k = _buffer(pool, like_k, capacity)
        self._flat_v, self.v = _buffer(pool, like_v, capacity)

    @property
    def capacity(self) -> int:
        return min(self.k.shape[2], self.v.shape[2])

    @property
    def buffers(self) -> list[Tensor]:
        return [self._flat_k, self._flat_v]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write behind the last row; the caller has seen to the room."""
        first, count = self.stop - self.origin, k.shape[2]
        self.k[:, :, first : first + count].copy_(k)
        self.v[:, :, first : first + count].copy_(v)
        self.stop += count

    def view(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """K and V of positions first .. last - 1. Raises IndexError for rows that are not held."""
        if not self.origin <= first <= last <= self.stop:
            raise IndexError(f"positions {first}:{last} are not held; {self.origin}:{self.stop} are")
        rows = slice(first - self.origin, last - self.origin)
        return self.k[:, :, rows], self.v[:, :, rows]

    def moved(self, origin: int, capacity: int) -> Rows:
        """The same rows from position `origin` on, in new buffers with room for `capacity`."""
        rows = Rows(self._pool, self.k, self.v, origin, capacity)
        rows.append(*self.view(origin, self.stop))
        return rows

    def moved_to(self, device: torch.device) -> Rows:
        """The same rows on another device; these buffers go back to the pool."""
        rows = Rows(
            self._pool, self.k[:, :, :0].to(device), self.v[:, :, :0].to(device), self.origin, self.capacity
        )
        rows.append(*self.view(self.origin, self.stop))
        self._pool.give(self.buffers)
        return rows


def _buffer(pool: BufferPool, like: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    batch, heads, _, size = like.shape
    row = batch * heads * size * like.element_size()
    flat = pool.take(row * capacity, like.device)
    capacity = flat.numel() // row  # a buffer of the pool may be larger
    with torch.inference_mode(False):
        return flat, flat[: row * capacity].view(like.dtype).view(batch, heads, capacity, size)


def as_array(tensor: Tensor) -> Array:
    """A CPU tensor's memory as numpy sees it; bfloat16 as its bit patterns in uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


class KeptLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer. Behaves as DynamicLayer for the model; `rows` is what it holds."""

    window: int | None = None

    def __init__(
        self, index: int, pool: BufferPool, room: int = ROOM_TOKENS, watch: Watch | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._set_up(index, pool, room, watch)

    def _set_up(self, index: int, pool: BufferPool, room: int, watch: Watch | None) -> None:
        self.index = index
        self.rows: Rows | None = None
        self.hold: int | None = None
        """First position that storing still needs; a sliding layer drops rows before it and its window when
        it grows."""
        self._pool = pool
        self._room = max(room, ROOM_TOKENS)
        self._watch = watch
        self._shown: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return what the new tokens may attend to."""
        if self._watch is not None:
            self._watch(self.index)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # Training: writing in place would break the graph, so concatenate as the base class does.
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        before = self._length
        rows = self._with_room(key_states, value_states)
        rows.append(key_states, value_states)
        return self._show(rows, before)

    def start(self, rows: Rows) -> None:
        """Begin with rows that were restored: the layer is as after a prefill of `rows.stop` tokens."""
        self.device, self.dtype = rows.k.device, rows.k.dtype
        self.is_initialized = True
        self.rows = rows
        self._show(rows, rows.stop)

    @property
    def _length(self) -> int:
        return int(self.get_seq_length())

    def _show(self, rows: Rows, before: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = shown = rows.view(0, rows.stop)
        self._shown = self.keys
        return shown

    def _with_room(self, k: Tensor, v: Tensor) -> Rows:
        """The rows, with place for the new tokens: new ones at first, and after anybody has changed `keys`
        (crop, beam reordering, repeats), so that rows once written stay as they are."""
        count, length = k.shape[2], self._length
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        rows = self.rows
        if rows is None or self.keys is not self._shown:
            keys, values = self.keys, self.values
            held = keys.shape[2] if keys is not None and keys.dim() == 4 else 0
            rows = Rows(self._pool, k, v, length - held, held + count + self._room)
            if keys is not None and values is not None and held:
                rows.append(keys, values)
        elif length - rows.origin + count > rows.capacity:
            origin = self._first_needed(rows, length)
            room = max(self._room, (length - origin) // 4)
            rows = rows.moved(origin, length - origin + count + room)
        self.rows = rows
        return rows

    def _first_needed(self, rows: Rows, length: int) -> int:
        return rows.origin


class KeptSlidingLayer(KeptLayer, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding layer: shows the model its window, and keeps the rows before it until they are stored."""

    def __init__(
        self, index: int, window: int, pool: BufferPool, room: int = ROOM_TOKENS, watch: Watch | None = None
    ) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self.window = window
        self._set_up(index, pool, room, watch)

    def _show(self, rows: Rows, before: int) -> tuple[Tensor, Tensor]:
        window = self.sliding_window
        shown = max(0, rows.stop - window + 1)
        if self.record_past:
            held = self.keys.shape[2] if self.keys is not None and self.keys.dim() == 4 else 0
            shown = before - held
        self.keys, self.values = rows.view(shown, rows.stop)
        self._shown = self.keys
        self.cumulative_length = rows.stop
        return rows.view(max(rows.origin, before - window + 1), rows.stop)

    def _first_needed(self, rows: Rows, length: int) -> int:
        if self.record_past:
            return rows.origin
        needed = length - self.sliding_window + 1
        return max(rows.origin, needed if self.hold is None else min(self.hold, needed))


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of each layer of the model's DynamicCache, None for full attention.

    Raises UnsupportedModel, naming the first layer that keeps its KV in another way.
    """
    windows: list[int | None] = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            raise UnsupportedModel(
                f"layer {index} keeps its KV in a {type(layer).__name__}; Retain knows full and sliding "
                "attention layers (DynamicLayer, DynamicSlidingWindowLayer)"
            )
    if not windows:
        raise UnsupportedModel(
            "the model's config does not say its layers, so Retain cannot tell what to keep"
        )
    return tuple(windows)


def kept_cache(
    windows: Sequence[int | None], pool: BufferPool, room: int, watch: Watch | None = None
) -> DynamicCache:
    """An empty DynamicCache whose layers keep their rows, with room for so many tokens before they grow."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [
        KeptLayer(index, pool, room, watch)
        if window is None
        else KeptSlidingLayer(index, window, pool, room, watch)
        for index, window in enumerate(windows)
    ]
    return cache


def layers_of(cache: Cache) -> list[KeptLayer]:
    """The layers of a cache made by `kept_cache`."""
    return [layer for layer in cache.layers if isinstance(layer, KeptLayer)]


def rows_of(cache: Cache) -> tuple[Rows, ...]:
    """What the layers hold now; empty where one holds nothing."""
    found = [layer.rows for layer in layers_of(cache)]
    held = tuple(rows for rows in found if rows is not None)
    return held if len(held) == len(found) else ()


def computed_tokens(cache: Cache) -> int:
    """How many tokens every layer holds: less than the longest where a forward pass broke off."""
    return min((rows.stop for rows in rows_of(cache)), default=0)
