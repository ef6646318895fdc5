"""The messages of the daemon's protocol (docs/protocol.md): arrays that begin with their name."""

from __future__ import annotations

import msgspec

VERSION = 2


class Request(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what a client sends."""


class OneWay(Request, frozen=True):
    """Base of what a client sends without waiting for a reply."""


class Reply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what the daemon answers."""


class Hello(Request, frozen=True):
    """The first message on a connection. `session` empty opens a session; else the connection joins it."""

    version: int
    client: str
    session: bytes


class Welcome(Reply, frozen=True):
    """The answer to Hello; a file descriptor of the arena comes with it when the session is new."""

    version: int
    session: bytes
    span: int
    tiers: list[tuple[str, str, int]]
    """Each tier's name, kind and capacity in bytes, in the order they are asked."""


class Refused(Reply, frozen=True):
    """The request was not carried out, and why."""

    reason: str


class Done(Reply, frozen=True):
    """The request was carried out; `value` is its count or truth."""

    value: int


class Model(Request, frozen=True):
    """Declare a model under a number of the client's; `header` is the metadata form of its ModelSpec."""

    number: int
    spec: ModelWire


class ModelWire(msgspec.Struct, array_like=True, frozen=True):
    """A ModelSpec; `layers` as in an object's header."""

    name: str
    architecture: str
    layers: str
    dtype: str
    kin: bytes
    variant: bytes
    adapter: bytes | None


class Lookup(Request, frozen=True):
    """Find the longest usable prefix of a chain, which the daemon remembers as the session's number `chain`:
    the first `keep` keys of its earlier chain number `base`, and `keys` (32 bytes each) behind them.

    `rest` are the token ids (u32le) behind the last full block, less than a block of them: shared tiers are
    asked for the tails that end there.
    """

    model: int
    chain: int
    base: int
    keep: int
    keys: bytes
    root: bytes
    block_tokens: int
    slice: str
    fidelity: str
    limit: int
    rest: bytes = b""


class Candidate(msgspec.Struct, array_like=True, frozen=True):
    """A kept block that may continue the last full one: the reader compares the token ids (u32le)."""

    key: bytes
    tokens: bytes
    media: tuple[int, ...]
    tier: int
    size: int


class Found(Reply, frozen=True):
    """What a lookup found, leased under `lease`: for every full block its lowest tier and bytes, and
    candidates.

    `speeds` gives each tier's predicted seconds an object and seconds a byte, where they are known.
    """

    lease: int
    parts: list[tuple[int, int]]
    candidates: list[Candidate]
    speeds: dict[str, tuple[float, float]]


class Settle(OneWay, frozen=True):
    """The reader's decision: it will use `parts` full blocks and perhaps a candidate, `tokens` in all of
    `found`.

    With `tokens` 0 the lease ends.
    """

    lease: int
    parts: int
    candidate: int
    tokens: int
    found: int


class Load(Request, frozen=True):
    """Bring the settled blocks of a lease into the arena. With `end` the lease ends; else others load too."""

    lease: int
    model: int
    timeout: float
    end: bool


class Blocks(Reply, frozen=True):
    """Blocks in the arena, leased under `lease`: for each block its pieces, (offset, size) in bytes."""

    lease: int
    blocks: list[list[tuple[int, int]]]


class Release(OneWay, frozen=True):
    """End a lease."""

    lease: int


class Reserve(Request, frozen=True):
    """Ask for a place of `size` bytes for the raw object `name` of a space; `ttl` bounds for how many seconds
    it is kept.
    """

    name: str
    size: int
    space: bytes = b""
    ttl: float | None = None


class Place(Reply, frozen=True):
    """The place's offset in the arena, or -1 and the reason why there is none."""

    offset: int
    reason: str


class Commit(Request, frozen=True):
    """The place of `name` is filled; the daemon verifies the object before anyone sees it."""

    name: str


class Kept(Reply, frozen=True):
    """A StoreResult."""

    kept: bool
    reason: str


class Abandon(OneWay, frozen=True):
    """Give a reserved place back."""

    name: str


class Missing(Request, frozen=True):
    """Which of the keys (32 bytes each) no tier can give in full."""

    model: int
    keys: bytes
    slice: str
    fidelity: str


class Indices(Reply, frozen=True):
    """Indices of keys."""

    values: list[int]


class Nearest(Request, frozen=True):
    """How far a chain of keys is kept, under any form, and what continues it there."""

    keys: bytes
    root: bytes


class Continuations(Reply, frozen=True):
    """The number of leading keys that are kept, and the token ids (u32le) of kept blocks behind the last."""

    depth: int
    tokens: list[bytes]


class PrefixWire(msgspec.Struct, array_like=True, frozen=True):
    """The first tokens of prompts: keys of full blocks (32 bytes each), the parent of the first, token ids
    (u32le) behind the last; `beyond`: and what continues them.
    """

    keys: bytes
    root: bytes
    rest: bytes
    beyond: bool


class SelectionWire(msgspec.Struct, array_like=True, frozen=True):
    """Blocks for which all that is said holds: keys (32 bytes each), a prefix, the digests of a space, a kin
    or a variant, a tenant's name, seconds since they were stored, the kind or name of a tier.
    """

    keys: bytes | None = None
    prefix: PrefixWire | None = None
    space: bytes | None = None
    kin: bytes | None = None
    variant: bytes | None = None
    tenant: str | None = None
    older_than: float | None = None
    tier: str | None = None


class Remove(Request, frozen=True):
    """Remove what is selected."""

    which: SelectionWire


class Pin(Request, frozen=True):
    """Keep what is selected from being evicted, or no longer."""

    which: SelectionWire
    pinned: bool


class Warm(Request, frozen=True):
    """Bring the blocks of these keys (32 bytes each) up into memory."""

    keys: bytes


class Tallied(Reply, frozen=True):
    """What was removed or pinned: blocks, objects and bytes in all, objects and bytes by tier, and in words
    what could not be reached.
    """

    blocks: int
    objects: int
    bytes: int
    tiers: dict[str, tuple[int, int]]
    missed: list[str]


class Own(OneWay, frozen=True):
    """A space belongs to a tenant."""

    space: bytes
    tenant: str


class Fly(Request, frozen=True):
    """Lead the computation of a block, or wait for who does."""

    key: bytes
    timeout: float


class Flying(Reply, frozen=True):
    """`number` names the flight of a leader, 0 for a follower; `landed` says that the leader finished in
    time.
    """

    number: int
    landed: bool


class Land(OneWay, frozen=True):
    """The leader of a flight is done."""

    number: int


class Flush(Request, frozen=True):
    """Wait until what was stored is written to the tiers below."""

    timeout: float


class Stats(Request, frozen=True):
    """Ask for the cache's state."""


class State(Reply, frozen=True):
    """The cache's state: counters, failures by reason, tiers as (name, kind, objects, bytes, capacity,
    leased, pinned, codec), pending writes, the daemon's process id, uptime in seconds, sessions; of
    remote tiers whether they are up, and why not; bytes held for objects on their way in; by tier, who has
    what of its room.
    """

    counters: dict[str, int]
    failures: dict[str, int]
    tiers: list[tuple[str, str, int, int, int, int, int, str]]
    pending: int
    pid: int
    uptime: float
    sessions: int
    health: dict[str, str] = {}
    temporary: int = 0
    rooms: dict[str, RoomWire] = {}


class RoomWire(msgspec.Struct, array_like=True, frozen=True):
    """The room of a tier: pinned bytes, objects and bytes that no prompt can reach, objects and bytes by
    tenant.
    """

    pinned_bytes: int
    unreachable_objects: int
    unreachable_bytes: int
    tenants: dict[str, tuple[int, int]]


class Count(OneWay, frozen=True):
    """Add to a counter."""

    name: str
    n: int


class Failure(OneWay, frozen=True):
    """Count and log a failure that a client saw."""

    reason: str
    detail: str


class Bye(OneWay, frozen=True):
    """The session closes in order: nothing of the arena is in use by it any more."""


class Unused(OneWay, frozen=True):
    """An earlier session of this process, which broke off, uses nothing of the arena any more."""

    session: bytes


class Stop(Request, frozen=True):
    """End the daemon."""


REQUESTS = (
    Hello | Model | Lookup | Settle | Load | Release | Reserve | Commit | Abandon | Missing | Nearest | Remove
    | Pin | Warm | Own | Fly | Land | Flush | Stats | Count | Failure | Bye | Unused
    | Stop
)  # fmt: skip
REPLIES = (
    Welcome | Refused | Done | Found | Blocks | Place | Kept | Indices | Continuations | Tallied | Flying
    | State
)  # fmt: skip
