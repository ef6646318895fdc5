"""The worker's side: moves blocks between the cache and vLLM's pages, in threads behind the engine.

Nothing here raises into the engine. A load that fails is reported as such, and vLLM computes what is missing;
a save that fails is a block that is not kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from retain.block import make_header
from retain.cache import Loaded
from retain.codecs.base import Array
from retain.dtypes import converted
from retain.errors import UnsupportedModel
from retain.fidelity import inherited
from retain.header import BlockHeader
from retain.model import ModelSpec, Slice

from . import model, selftest
from .device import Immediate, Ordering, ordering
from .layout import LayerPages, groups_of, pages_of
from .messages import Load, Report, Save, Step
from .metrics import Counts
from .pages import DevicePages, HostPages, PagedKV
from .settings import Settings
from .shared import Shared
from .version import producer

log = logging.getLogger("vllm.retain")

PRODUCER = producer()
LOADERS = 2
"""Threads that copy into pages: as many as it takes to fill the memory's bandwidth, nearly."""

AT_ONCE_TOKENS = 16_384
"""Up to so many tokens in memory are loaded in the engine's own thread while it has nothing to compute."""

Piece = tuple[dict[str, Array], int, int, int]


class Worker:
    """One worker's half of the connector. `step` calls come from the engine's thread, one after the other."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, shared: Shared, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._cache = shared.cache
        self._settings = settings
        self._layers = model.layers(vllm_config)
        self._dtype = model.dtype(vllm_config)
        self._groups = groups_of(kv_cache_config)
        self._models: dict[int, ModelSpec] = {}
        self._slice = Slice(0, len(self._layers))
        self._stores = True
        self._paged: PagedKV | None = None
        self._order: Ordering = ordering(torch.device("cpu"))
        self._loaders = ThreadPoolExecutor(LOADERS, "retain-load")
        self._saver = ThreadPoolExecutor(1, "retain-save")
        self._loaded: deque[tuple[Load, int]] = deque()
        self._saved: deque[int] = deque()
        self._cancelled: set[str] = set()
        self._loading: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._loaded_kinds: dict[tuple[str, bytes | None], BlockHeader] = {}
        self._inherits: tuple[str, bytes | None] = ("exact", None)
        self.counts = Counts()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the pages and test them. Raises UnsupportedModel where they are not understood."""
        started = time.perf_counter()
        attention = _attention(self._vllm_config, self._kv_cache_config)
        backends = {
            name: (layer.get_attn_backend().get_name(), getattr(layer, "isa", None))
            for name, layer in attention.items()
        }
        held = pages_of(
            kv_caches,
            self._kv_cache_config,
            backends,
            self._layers,
            _indices(attention, self._vllm_config),
            self._dtype,
        )
        self._slice, self._stores = _rank_slice(self._vllm_config, self._layers, held)
        _check_heads(held, self._layers, self._slice)
        device = held[0].cache.device
        pages = HostPages if device.type == "cpu" else DevicePages
        paged = pages(held, self._layers, self._dtype)
        self._order = ordering(device)
        selftest.run(paged, held, self._groups, self._layers, self._dtype, attention)
        self._paged = paged
        log.info(
            "Retain keeps the KV of %d layers (%s) as slice %s; its self-test passed in %.0f ms",
            len(held),
            ", ".join(sorted({name for name, _ in backends.values()})),
            self._slice.text,
            1000 * (time.perf_counter() - started),
        )

    @property
    def immediate(self) -> bool:
        """Whether what the engine computed is in its pages as soon as its call returned."""
        return isinstance(self._order, Immediate)

    @property
    def _pages(self) -> PagedKV:
        if self._paged is None:
            raise RuntimeError("vLLM registered no KV cache")
        return self._paged

    # each step, in this order

    def start_loads(self, step: Step) -> None:
        """Begin the step's loads. While nothing is to be computed, what lies in memory is loaded at once."""
        self._models.update(step.models)
        self._cancelled |= step.cancelled & self._loading
        if not step.loads:
            return
        after = self._order.mark()
        budget = AT_ONCE_TOKENS if step.idle else 0
        for load in step.loads:
            self._loading.add(load.request)
            tokens = load.stop - load.start
            try:
                if load.resident and tokens <= budget:
                    budget -= tokens
                    self._load(load, after, at_once=True)
                else:
                    self._loaders.submit(self._load, load, after, at_once=False)
            except Exception as error:  # vLLM waits for every load it was promised
                self._fail("a load could not be begun", error)
                self._loaded.append((load, load.start))

    def start_saves(self, saves: Sequence[Save]) -> None:
        """Begin the step's saves. Their pages must stay as they are until they are reported."""
        if not saves:
            return
        if self._paged is None or not self._stores:
            self._saved.extend(save.job for save in saves)
            return
        begun = 0
        try:
            after = self._order.mark()
            for save in saves:
                self._saver.submit(self._save, save, after)
                begun += 1
        except Exception as error:
            self._fail("saves could not be begun", error)
            self._saved.extend(save.job for save in saves[begun:])

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those among them that failed."""
        received: set[str] = set()
        failed: set[str] = set()
        while self._loaded:
            load, good = self._loaded.popleft()
            received.add(load.request)
            self._loading.discard(load.request)
            self._cancelled.discard(load.request)
            if good < load.stop:
                failed.add(load.request)
                self._failed.add(load.request)
                self._mark_bad(load, good)
        return received, failed if len(self._groups) > 1 else set()

    def bad_blocks(self) -> set[int]:
        """vLLM's blocks that were to be loaded and were not, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> Report | None:
        """What the scheduler's side needs to know."""
        if not self._saved and not self._failed:
            return None
        saved: dict[int, int] = {}
        while self._saved:
            saved[self._saved.popleft()] = 1
        failed, self._failed = self._failed, set()
        return Report(saved, failed)

    def flush(self, timeout: float) -> bool:
        """Wait until the saves submitted so far are in the cache; False where that takes longer."""
        try:
            self._saver.submit(lambda: None).result(timeout)
        except (TimeoutError, RuntimeError):
            return False
        return True

    def close(self) -> None:
        """Finish what was begun, briefly; idempotent."""
        self.flush(10.0)
        self._saver.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)

    # in the threads

    def _load(self, load: Load, after: object, at_once: bool) -> None:
        started = time.perf_counter()
        good = load.start
        try:
            if self._paged is not None and load.request not in self._cancelled:
                hit = self._cache.claim(load.ticket, self._models[load.model], self._slice)
                with self._cache.load(hit, timeout=self._settings.load_timeout) as loaded:
                    good = self._order.run(after, lambda: self._scatter(load, loaded, at_once))
        except Exception as error:
            self._fail("a load into vLLM's pages failed", error)
        finally:
            self.counts.add_load(good - load.start, time.perf_counter() - started)
            if good < load.stop and load.request not in self._cancelled:
                self.counts.failed_loads += 1
            self._loaded.append((load, good))

    def _scatter(self, load: Load, loaded: Loaded, at_once: bool) -> int:
        """Copy the loaded blocks into the pages; returns the position up to which all is there."""
        pieces: list[Piece] = []
        self._note_fidelity(loaded)
        at = load.start
        for block, length in zip(loaded.blocks, loaded.lengths, strict=True):
            first = block.header.first
            low, high = max(first, at), min(first + length, load.stop)
            if low > at:
                break
            if low < high:
                held = converted(block, self._models[0].dtype)  # a peer's may be in another
                pieces.append((dict(held.arrays), low, low - first, high - low))
                at = high
        if at_once and len(pieces) > 1:
            # The engine's thread takes one half and a loader the other.
            other = self._loaders.submit(self._scatter_pieces, load, pieces[1::2])
            self._scatter_pieces(load, pieces[::2])
            other.result()
        else:
            self._scatter_pieces(load, pieces)
        return load.start if load.request in self._cancelled else at

    def _note_fidelity(self, loaded: Loaded) -> None:
        """From the first block on that is not exact, what is stored says so: vLLM's own prefix cache may
        share its pages with any later request."""
        for header in (block.header for block in loaded.blocks):
            kind = (header.fidelity, header.lineage)
            if header.fidelity != "exact" and kind not in self._loaded_kinds:
                self._loaded_kinds[kind] = header
                self._inherits = inherited(self._loaded_kinds.values())

    def _scatter_pieces(self, load: Load, pieces: Sequence[Piece]) -> None:
        for arrays, position, start, count in pieces:
            if load.request in self._cancelled:
                return
            self._pages.scatter(arrays, load.tables, position, start, count)

    def _save(self, save: Save, after: object) -> None:
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._saved.append(save.job)

        started, cpu = time.perf_counter(), time.thread_time()
        try:
            kept = self._store(save, after, release)
            if kept:
                self.counts.add_save(kept, time.perf_counter() - started, time.thread_time() - cpu)
        except Exception as error:
            self._fail("computed KV could not be stored", error)
        finally:
            release()

    def _store(self, save: Save, after: object, release: Callable[[], None]) -> int:
        tokens = np.frombuffer(save.tokens, "<u4")
        header = make_header(
            self._models[save.model],
            space=save.space,
            parent=save.parent,
            tokens=tokens,
            first=save.first,
            slice=self._slice,
            media=save.media,
            fidelity=self._inherits[0],
            lineage=self._inherits[1],
            producer=PRODUCER,
        )
        place = self._cache.reserve(header)
        if place is None:
            return 0
        try:
            place.tokens[:] = tokens
            paged, arrays = self._pages, place.arrays
            self._order.run(after, lambda: paged.gather(arrays, save.tables, save.first, 0, tokens.size))
        except BaseException:
            place.abandon()
            raise
        release()
        return int(tokens.size) if place.commit().kept else 0

    def _mark_bad(self, load: Load, good: int) -> None:
        if len(self._groups) > 1:
            return  # vLLM's blocks are numbered by group: it takes the request as a whole
        table = load.tables[0]
        self._bad_blocks.update(table.ids[good // table.block_tokens - table.first :].tolist())

    def _fail(self, reason: str, error: Exception) -> None:
        self._cache.failure(reason, f"{type(error).__name__}: {error}")


def _attention(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    context = vllm_config.compilation_config.static_forward_context
    found = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            layer = context.get(name)
            if layer is None:
                raise UnsupportedModel(f"vLLM's layer {name} has a cache but is none of the model's modules")
            if getattr(layer, "is_draft_layer", False):
                raise UnsupportedModel(
                    f"the layer {name} belongs to a draft model, whose KV is not kept. Use a drafter without "
                    "KV (ngram), or none"
                )
            found[name] = layer
    return found


def _indices(attention: dict[str, Any], vllm_config: Any) -> dict[str, int]:
    from vllm.model_executor.models.utils import extract_layer_index

    found = {}
    for name in attention:
        try:
            found[name] = int(extract_layer_index(name))
        except AssertionError as error:
            raise UnsupportedModel(f"which of the model's layers vLLM's {name} is cannot be told") from error
    return found


def _rank_slice(vllm_config: Any, layers: tuple[Any, ...], held: Sequence[LayerPages]) -> tuple[Slice, bool]:
    from vllm.distributed import get_tensor_model_parallel_rank

    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    rank = int(get_tensor_model_parallel_rank()) if ranks > 1 else 0
    return model.rank_slice(layers, range(held[0].index, held[-1].index + 1), rank, ranks)


def _check_heads(held: Sequence[LayerPages], layers: tuple[Any, ...], part: Slice) -> None:
    for layer in held:
        total = layers[layer.index].heads
        expected = len(part.heads(total)) if total > 1 else 1
        if layer.heads != expected:
            raise UnsupportedModel(
                f"the layer {layer.name} holds {layer.heads} KV heads, expected were {expected} of {total}"
            )
