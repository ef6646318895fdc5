"""Session: one request's run through the model, from the kept prefix to the last token it stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import DynamicCache

from retain.cache import Flight
from retain.engines.report import Report
from retain.fidelity import quality_of
from retain.identity import Chain, Tokens

from .capture import Recorder
from .layers import Rows


class Cancelled(Exception):
    """Raised inside a forward pass whose request was cancelled."""


@dataclass(frozen=True)
class Reused:
    """A stretch of a prompt that came from one kept block, and what its header tells of its fidelity."""

    key: bytes
    first: int
    tokens: int
    fidelity: str = "exact"
    lineage: bytes | None = None
    codec: str = "raw"

    @property
    def quality(self) -> str:
        """The quality by which it may differ from what the model computes; "" where that cannot be told."""
        return "exact" if self.fidelity == "exact" else quality_of(self.codec, self.lineage) or ""


@dataclass
class Watcher:
    """Looks on as a forward pass goes from layer to layer: reports how far it is, and ends it when asked
    to."""

    layers: int
    cancelled: Callable[[], bool]
    progress: Callable[[float], None] | None = None
    active: bool = True

    def __call__(self, layer: int) -> None:
        if not self.active:
            return
        if self.cancelled():
            raise Cancelled
        if self.progress is not None:
            self.progress(layer / self.layers)

    def __deepcopy__(self, memo: dict[int, object]) -> Watcher:
        return self  # it belongs to the request, not to the cache that a caller copies

    def end(self) -> None:
        """The prefill is done; what follows is not looked at."""
        if self.active and self.progress is not None:
            self.progress(1.0)
        self.active = False


class Shared:
    """Something that several parties use, taken back when the last of them is done."""

    def __init__(self, take_back: Callable[[], None]) -> None:
        self._take_back: Callable[[], None] | None = take_back
        self._lock = threading.Lock()
        self._users = 1

    def use(self) -> None:
        with self._lock:
            self._users += 1

    def done(self) -> None:
        with self._lock:
            self._users -= 1
            take_back = None if self._users else self._take_back
            if take_back is not None:
                self._take_back = None  # what it refers to, in the end a whole cache, is not held any longer
        if take_back is not None:
            take_back()


@dataclass
class Session:
    """A request that has the model's turn. `cache` holds the KV of the first `start` tokens when it
    begins."""

    chain: Chain
    report: Report
    cache: DynamicCache
    start: int
    reused: tuple[Reused, ...]
    recorder: Recorder | None
    watcher: Watcher
    flight: Flight | None
    buffers: Shared
    began: float
    tokens: Sequence[int] | Tokens
    """The prompt, then also the answer as far as it goes."""
    logits: Tensor | None = None
    """Logits `[vocabulary]` that the prompt's last token gave, for the audit."""
    returned: bool = False
    """Whether the caller has got the cache, so that its buffers are no longer ours."""
    rows: tuple[Rows, ...] = ()
    """What the layers held at the end. Rows never change, whatever is done to the cache afterwards."""
