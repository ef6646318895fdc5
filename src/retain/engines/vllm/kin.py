"""Kin in vLLM: a request loads its own variant's KV, or a peer's whole where that reaches further."""

from __future__ import annotations

from retain.cache import BlockCache, Hit, Query
from retain.engines.kinship import Peers, search
from retain.model import ModelSpec

from .requests import Tracked


def find(
    cache: BlockCache,
    query: Query,
    peers: Peers,
    tracked: Tracked,
    models: Models,
    *,
    plan: bool,
) -> Hit:
    """What is kept of a query. Notes in `tracked` which model's KV it is."""
    tracked.reads_as = None
    kin = search(cache, query, peers.of(query.spec), plan=plan)
    if kin.other is None or kin.peer is None:
        return kin.own
    kin.own.release()
    tracked.reads_as = models.number(kin.peer.variant, kin.peer.as_spec(query.spec))
    tracked.stores = False  # what is computed behind is no more exact than what it was computed on
    return kin.other


class Models:
    """The models whose KV one engine reads, by the numbers that its workers know: its own, with adapters, and
    peers."""

    def __init__(self, spec: ModelSpec) -> None:
        self._numbers: dict[bytes | None, int] = {None: 0}
        self._new: list[tuple[int, ModelSpec]] = [(0, spec)]

    def number(self, key: bytes | None, spec: ModelSpec) -> int:
        """The number of a model, a new one where `key` is: that of an adapter, or a peer's variant."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._new.append((number, spec))
        return number

    @property
    def untold(self) -> bool:
        """Whether workers have to be told of a model."""
        return bool(self._new)

    def new(self) -> list[tuple[int, ModelSpec]]:
        """The models that workers have not been told of yet."""
        found, self._new = self._new, []
        return found
