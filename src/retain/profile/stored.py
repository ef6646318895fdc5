"""Blocks that are stored already, as samples to learn from: the KV of one's own traffic."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from retain.block import decode
from retain.codecs.ladder.transform import to_floats
from retain.errors import InvalidObject, StoreError
from retain.model import ModelSpec
from retain.profile.gather import Sample
from retain.stores.base import Store, StoredObject

log = logging.getLogger("retain.profile")


def stored_samples(spec: ModelSpec, stores: Sequence[Store], most: int) -> Iterator[Sample]:
    """The exact, whole blocks of a kin in these stores, the latest first, until they hold `most` tokens.

    What cannot be read is left out, and named in the log.
    """
    found: list[tuple[Store, StoredObject]] = [(store, each) for store in stores for each in store.scan()]
    tokens = 0
    for store, each in sorted(found, key=lambda pair: -pair[1].modified):
        if tokens >= most:
            return
        data = memoryview(bytearray(each.size))
        try:
            store.read_into(each.name, data)
            block = decode(data)
        except (InvalidObject, StoreError) as error:
            log.warning("%s is not learned from: %s", each.name[:16], error)
            continue
        header = block.header
        exact = header.fidelity == "exact" and header.lineage is None
        if header.kin == spec.kin and header.layers == spec.layers and header.slice == spec.whole and exact:
            tokens += header.count
            arrays = {name: to_floats(array, header.dtype) for name, array in block.arrays.items()}
            yield Sample(arrays, block.tokens, header.first)
