"""The host: a GGUF model in llama.cpp as Retain sees it. What it keeps, how it is run, filled and copied
out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from retain.block import Block
from retain.digests import DigestCache, cache_directory
from retain.errors import InvalidObject, UnsupportedModel
from retain.gguf import GgufFile
from retain.identity import Tokens
from retain.models import Source

from .identity import spec_of
from .layout import Layout, pieces
from .native import Logits, NativeContext, NativeModel
from .state import DIALECTS, TYPES, Array, Dialect, StateForm

BATCH = 512
"""Tokens that llama.cpp computes in one go; its own default."""

CONTEXT = 8192
"""Tokens of a sequence where nobody says, or the model's own context where that is shorter."""

_RESTORERS = 2


@dataclass(frozen=True)
class Settings:
    """How llama.cpp is run. `dtype` is that of its KV cache; `context` the most tokens of a sequence."""

    context: int | None = None
    dtype: str = "float16"
    flash: bool = True
    threads: int | None = None
    sequences: int = 1
    batch: int = BATCH

    def __post_init__(self) -> None:
        if self.dtype not in TYPES:
            raise UnsupportedModel(
                f"llama.cpp's KV cache cannot be {self.dtype!r} here: quantised caches hold K and V rotated "
                f"and rounded, which no other engine could read; known are {', '.join(TYPES)}"
            )
        if self.sequences < 1 or self.batch < 1:
            raise UnsupportedModel(
                f"at least one sequence and a batch of one token, got {self.sequences} and {self.batch}"
            )


class Host:
    """A loaded model. Sequences are taken by `sequence`; calls that run the model wait for each other."""

    def __init__(self, source: Source, settings: Settings, known: DigestCache | None = None) -> None:
        """Raises UnsupportedModel, naming what about the model, or llama.cpp's build, cannot be kept."""
        if source.kind != "gguf":
            raise UnsupportedModel(f"llama.cpp reads GGUF files; {source.path} is none")
        self.settings = settings
        self.gguf = GgufFile(source.path)
        digests = known or DigestCache(cache_directory() / "digests.json")
        self.spec = spec_of(self.gguf, source.name, settings.dtype, digests)
        self.model = NativeModel(source.path)
        self.layout = Layout(
            self.spec,
            window=self.model.window,
            dtype=settings.dtype,
            flash=settings.flash,
            interleaved=self.gguf.interleaved,
        )
        self.context = settings.context or min(CONTEXT, self.model.trained_context)
        # One sequence more than asked for: blocks are copied out of it.
        self._scratch = settings.sequences
        self._native = NativeContext(
            self.model,
            tokens=self.context * settings.sequences,
            sequences=settings.sequences + 1,
            dtype=settings.dtype,
            flash=settings.flash,
            threads=settings.threads or os.cpu_count() or 1,
            batch=settings.batch,
        )
        self._lock = threading.RLock()
        self._free = threading.Condition()
        self._idle = list(range(settings.sequences))
        self._restorers = ThreadPoolExecutor(_RESTORERS, thread_name_prefix="retain-restore")
        self._buffer = np.empty(0, np.uint8)
        self._form = self._probe()

    @property
    def dialect(self) -> Dialect:
        """How this build writes states."""
        return self._form.dialect

    @property
    def step(self) -> int:
        """Tokens that are run, and copied out, at a time: no row of a sliding layer leaves before."""
        return min(self.settings.batch, self.layout.window or self.settings.batch)

    @contextmanager
    def sequence(self, cancelled: Callable[[], bool]) -> Any:
        """An empty sequence for as long as the block lasts; None when `cancelled` says so before one is
        free."""
        with self._free:
            while not self._idle:
                if cancelled():
                    break
                self._free.wait(0.05)
            number = self._idle.pop() if self._idle else None
        try:
            yield number
        finally:
            if number is not None:
                with self._lock:
                    self._native.clear(number)
                with self._free:
                    self._idle.append(number)
                    self._free.notify()

    def run(self, sequence: int, tokens: Sequence[int] | Tokens, first: int, keep: int = 1) -> Logits:
        """Run at most `step` tokens at positions from `first` on; logits of the last `keep`."""
        with self._lock:
            return self._native.decode(sequence, tokens, first, keep)

    def prefill(
        self,
        sequence: int,
        tokens: Tokens,
        first: int,
        keep: int,
        done: Callable[[int], None],
    ) -> Logits:
        """Run tokens from position `first` to the end, in pieces; logits of the last `keep`. `done` is told
        how far it is after each piece; what it raises ends the run."""
        rows: list[Logits] = []
        total = int(tokens.size)
        for start, end in pieces(first, total, self.step):
            wanted = max(0, end - max(start, total - keep))
            rows.append(self.run(sequence, tokens[start:end], start, wanted))
            done(end)
        return np.concatenate(rows)

    def restore(self, sequence: int, blocks: Sequence[Block], lengths: Sequence[int]) -> None:
        """Fill an empty sequence with kept blocks. Raises InvalidObject, the sequence empty, where they do
        not fit; llama.cpp is not asked then."""
        tokens = sum(lengths)
        self._check(blocks, lengths, tokens)
        firsts, counts = self.layout.spans(tokens)
        with self._lock:
            state = self._space(self._form.size(counts))
            views = self._form.write(state, firsts, counts)
            self.layout.fill(views, firsts, blocks, lengths, self._restorers)
            if not self._native.set_state(sequence, state):
                raise InvalidObject("llama.cpp did not take the state that was made for it")
            if self._native.length(sequence) != tokens:
                self._native.clear(sequence)
                raise InvalidObject(f"llama.cpp took a state of {tokens} tokens and says it holds another")

    def capture(self, sequence: int, first: int, last: int, origin: int, arrays: Mapping[str, Array]) -> None:
        """Copy the KV of positions first .. last - 1 into a block's arrays, whose first token is at `origin`.

        Of a sliding layer they must be among the last that its window holds. Raises InvalidObject.
        """
        with self._lock:
            self._native.clear(self._scratch)
            self._native.share(sequence, self._scratch, first, last)
            try:
                state = self._native.get_state(self._scratch)
            finally:
                self._native.clear(self._scratch)
        views = self._form.read(state)
        got = self.layout.copy_out(views, range(len(views)), origin, arrays)
        if got != last - first:
            raise InvalidObject(f"llama.cpp gave {got} of {last - first} tokens of a sequence's KV")

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        with self._lock:
            return self._native.length(sequence)

    def load_file(self, sequence: int, path: str) -> bool:
        """llama.cpp's own restore of a sequence from its file: what Retain's is measured against."""
        with self._lock:
            return self._native.load_file(sequence, path)

    def save_file(self, sequence: int, path: str) -> None:
        """llama.cpp's own file of a sequence."""
        with self._lock:
            self._native.save_file(sequence, path)

    def close(self) -> None:
        """Free context and weights. Idempotent."""
        with self._lock:
            self._native.close()
            self.model.close()
        self._restorers.shutdown()

    def _probe(self) -> StateForm:
        """The form of this build's states: the dialect by the version of its state files, the form by reading
        a state of one token, of which every byte must be accounted for."""
        with self._lock:
            self._native.decode(0, [0], 0, 1)
            try:
                form = self.layout.form(DIALECTS[self._native.file_version(0)])
                state = self._native.get_state(0)
                try:
                    form.read(state)
                except InvalidObject as error:
                    raise UnsupportedModel(
                        f"llama.cpp's state of this model is not as its spec says: {error}"
                    ) from error
                return form
            finally:
                self._native.clear(0)

    def _check(self, blocks: Sequence[Block], lengths: Sequence[int], tokens: int) -> None:
        if not 0 < tokens <= self.context:
            raise InvalidObject(f"{tokens} kept tokens do not fit a context of {self.context}")
        at = 0
        for block, length in zip(blocks, lengths, strict=True):
            header = block.header
            if header.first != at or not 0 < length <= header.count:
                raise InvalidObject(f"a kept block begins at {header.first} where token {at} is due")
            if header.layers != self.spec.layers or header.slice != self.spec.whole:
                raise InvalidObject("a kept block has other layers than this model")
            at += length

    def _space(self, size: int) -> Array:
        """A buffer that is kept: touching fresh pages would cost as much as the copy."""
        if not size <= self._buffer.size <= 4 * size + (1 << 24):
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]
