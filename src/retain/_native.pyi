"""The native part of retain (native/*.cpp): index, memory allocator and copy."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.generic]

Slots: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]

class Record:
    """What an index knows of one object, as it was when asked for."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def form(self) -> int: ...
    @property
    def space(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes of the object."""
    @property
    def offset(self) -> int: ...
    @property
    def tick(self) -> int:
        """When it was inserted or last touched, counted in insertions and touches of the whole index."""
    @property
    def refs(self) -> int:
        """Leases on it."""
    @property
    def hits(self) -> int:
        """Times it was touched."""
    @property
    def pinned(self) -> bool: ...

class Index:
    """The objects of one tier: found by key, chained by parent, ordered by who goes next.

    About 145 bytes a record, 190 with "reuse-leaf". A record is known by its slot, a number that is given to
    another record once this one was removed. Methods raise IndexError for a slot that holds no record; those
    that take several slots change nothing then. Every call holds the GIL: it is atomic among Python threads.

    Policies: "lru" lets the record go that was used longest ago; "lru-leaf" does so among the records whose
    key is the parent of no record in this index, children before parents; "reuse-leaf" takes, of the same
    records, the one least likely to be used again for the room it takes, by what became of records used as
    often and as long ago, evicted ones included. Leased and pinned records never go.
    """

    def __init__(self, policy: str) -> None:
        """Raises ValueError for an unknown policy."""
    def insert(self, key: bytes, form: int, space: int, parent: bytes, size: int, offset: int = 0) -> int:
        """Add a record as the most recently used; return its slot. Raises KeyError if (key, form) is there.

        A record that names itself as its parent counts as nobody's child.
        """
    def remove(self, slot: int) -> None:
        """Forget a record, leases and pin included: whoever holds a lease on it must not release it later."""
    def find(self, key: bytes, form: int) -> int | None: ...
    def same_key(self, key: bytes) -> list[int]:
        """The slots of all forms of `key`, in no particular order."""
    def children(self, parent: bytes, limit: int) -> list[int]:
        """At most `limit` records whose parent is `parent`, most recently used first.

        `parent` itself need not be in the index.
        """
    def lookup(self, keys: bytes, forms: Sequence[int]) -> npt.NDArray[np.uint32]:
        """For each 32-byte key of `keys`, the slot of the first of `forms` that is there, else 0xFFFFFFFF."""
    def touch(self, slots: Slots) -> None:
        """Mark records as just used, the last of `slots` as the most recent; counts a hit for each."""
    def acquire(self, slots: Slots) -> None:
        """Take a lease on each."""
    def release(self, slots: Slots) -> None:
        """Give a lease on each back. Raises ValueError, and changes nothing, where there is none."""
    def pin(self, slot: int) -> bool:
        """Keep a record until it is unpinned; True if it was not pinned before."""
    def unpin(self, slot: int) -> bool:
        """The reverse of `pin`; True if it was pinned."""
    def victim(self) -> int | None:
        """The slot that goes next by the policy; None when every record is held. Does not remove it."""
    def record(self, slot: int) -> Record: ...
    def set_parent(self, slot: int, parent: bytes) -> None: ...
    def set_space(self, slot: int, space: int) -> None: ...
    def set_offset(self, slot: int, offset: int) -> None: ...
    def slots(self, space: int | None = None, form: int | None = None) -> npt.NDArray[np.uint32]:
        """All slots in use, or those of one space or form, in ascending order."""
    def space_bytes(self, space: int) -> tuple[int, int]:
        """(records, bytes) of one space."""
    def __len__(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Sum of the sizes of all objects."""
    @property
    def leased(self) -> int:
        """Records with at least one lease."""
    @property
    def pinned(self) -> int:
        """Records that are pinned."""
    @property
    def nbytes(self) -> int:
        """Memory that the index itself takes."""

class Arena:
    """An allocator of offsets for the memory arena: best fit with coalescing, in pages of 4096 bytes.

    Offsets come from 0 .. span, of which at most `capacity` bytes hold memory at a time. Not safe from
    several threads where calls must happen together: see `take`.
    """

    def __init__(self, capacity: int, span: int) -> None: ...
    def take(self, size: int) -> tuple[int, list[tuple[int, int]]] | None:
        """A place of `size` bytes: its offset, and ranges (offset, size) of idle memory that must go back to
        the system before anything else is taken or written. None when there is no room."""
    def give(self, offset: int) -> int:
        """Take a place back; returns its size in whole pages. Raises IndexError where nothing was taken."""
    def fresh(self, size: int) -> int | None:
        """A place of `size` bytes that holds no memory yet; its offset.

        None where the system would have to take idle memory back for it, or no offsets are left.
        """
    @property
    def capacity(self) -> int: ...
    @property
    def span(self) -> int: ...
    @property
    def used(self) -> int:
        """Bytes taken, in whole pages."""
    @property
    def idle(self) -> int:
        """Bytes that are free but still hold memory."""

class Pages:
    """Where the K, or the V, of some layers lies in the paged cache of an engine; all strides are in bytes.

    `bases` are the addresses of each layer's first number, which must stay valid as long as this is used;
    `rows` are the layers' rows in the canonical array `[layers, heads, tokens, dim]`. Both copies take
    `count` tokens, from token `first` of the pages that `table` names, in order, and from token `start` of
    the array. They run without the GIL. Raises ValueError for what does not fit; nothing was copied then.
    """

    def __init__(
        self,
        *,
        bases: Sequence[int],
        rows: Sequence[int],
        pages: int,
        page_tokens: int,
        heads: int,
        dim: int,
        item: int,
        page_stride: int,
        head_stride: int,
        token_stride: int,
        dim_stride: int,
        pairs: bool = False,
    ) -> None:
        """With `pairs`, numbers i and dim / 2 + i of a canonical head are neighbours in the pages."""
    def gather(
        self, array: npt.NDArray[Any], table: npt.NDArray[np.int64], first: int, start: int, count: int
    ) -> None:
        """Copy from pages into the array."""
    def scatter(
        self, array: npt.NDArray[Any], table: npt.NDArray[np.int64], first: int, start: int, count: int
    ) -> None:
        """Copy from the array into pages."""

def copy(target: Buffer, source: Buffer) -> None:
    """Copy bytes between contiguous buffers of equal size, without the GIL where they are large."""

def populate(buffer: Buffer) -> None:
    """Have the system give memory to every page of a writable buffer, leaving its bytes as they are."""

class LadderTables:
    """The tables of the ladder's entropy coder (docs/codecs.md), made ready; safe from several threads.

    `frequencies` uint16 `[43, 128]`, `splits` uint16 `[3, 40, 4, 2]`, `first` uint8 `[4]`. `path` names the
    code to run, one of `rans_paths()`; by default the fastest. All write the same bytes. Raises ValueError
    for tables that cannot be coded with.
    """

    def __init__(
        self,
        frequencies: npt.NDArray[np.uint16],
        splits: npt.NDArray[np.uint16],
        first: npt.NDArray[np.uint8],
        path: str | None = None,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    def encode(
        self,
        numbers: npt.NDArray[np.int16],
        classes: npt.NDArray[np.uint8],
        expected: npt.NDArray[np.uint8],
        steps: npt.NDArray[np.int8],
        energy: npt.NDArray[np.int8],
        level: int,
    ) -> list[bytes]:
        """The streams of levels 0 to `level` of a part, without the GIL.

        `numbers` `[components, tokens]` are those of `level`; they are those of level 0 afterwards. Raises
        ValueError where a number or class has no code.
        """
    def decode(
        self,
        streams: Sequence[npt.NDArray[np.uint8]],
        numbers: npt.NDArray[np.int16],
        classes: npt.NDArray[np.uint8],
        expected: npt.NDArray[np.uint8],
        steps: npt.NDArray[np.int8],
        energy: npt.NDArray[np.int8],
    ) -> None:
        """Fill a part's arrays, all but `expected`, from streams of its first levels, without the GIL.

        Raises ValueError for streams that no encoder wrote; the arrays are undefined then.
        """

_Turns: TypeAlias = Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], bool] | None]

def ladder_gather(
    array: npt.NDArray[Any],
    dtype: str,
    turns: _Turns,
    mean: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    rows: npt.NDArray[np.float32],
    at: int,
) -> None:
    """Write an array's numbers `[layers, heads, tokens, dim]`, turned, as (number - mean) * weight into
    `rows[tokens, at:]`, a token a row, in order (layer, head, dim)."""

def ladder_scatter(
    array: npt.NDArray[Any],
    dtype: str,
    turns: _Turns,
    mean: npt.NDArray[np.float32],
    inverse: npt.NDArray[np.float32],
    rows: npt.NDArray[np.float32],
    at: int,
) -> None:
    """The inverse of `ladder_gather`: turned(number * inverse + mean), to the nearest finite number."""

def ladder_probe(
    array: npt.NDArray[Any],
    dtype: str,
    turns: _Turns,
    probe: npt.NDArray[np.float32],
    dots: npt.NDArray[np.float32],
    norms: npt.NDArray[np.float32],
) -> None:
    """For each layer, head and token: the dot product of its numbers with the head's probe, their norm."""

def ladder_project(
    basis: npt.NDArray[np.uint16], rows: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
) -> None:
    """`values[component, token]` of rows padded with zeros; the basis is float16, seen as uint16."""

def ladder_quantise(
    values: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    numbers: npt.NDArray[np.int16],
    largest: npt.NDArray[np.float32],
) -> None:
    """Round values times the tokens' scale; gives each component's largest magnitude in whole numbers."""

def ladder_sizes(
    values: npt.NDArray[np.float32], share: npt.NDArray[np.float32], sizes: npt.NDArray[np.float32]
) -> None:
    """For each component, the sum of its magnitudes times the tokens' share."""

def ladder_loudness(
    values: npt.NDArray[np.float32],
    components: npt.NDArray[np.uint32],
    factors: npt.NDArray[np.float32],
    sums: npt.NDArray[np.float32],
) -> None:
    """For each token, add the magnitudes of some components times their factors."""

def ladder_spread(
    basis: npt.NDArray[np.uint16],
    numbers: npt.NDArray[np.int16],
    scale: npt.NDArray[np.float32],
    predicted: npt.NDArray[np.float32] | None,
    rows: npt.NDArray[np.float32],
) -> None:
    """The inverse of `ladder_project` and `ladder_quantise`; `predicted` is added to leading components."""

def rans_paths() -> list[str]:
    """The ways of coding that this processor can run, the fastest first."""
