"""What one token's KV looks like for a model: layers, heads, sizes, RoPE, and the digests that say which
weights made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from retain.errors import UnsupportedModel

LAYER_KINDS = ("full", "sliding", "latent", "state")
DTYPES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The dtypes KV may have, and their size in bytes. numpy holds bfloat16 as uint16 bit patterns."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base, how many of a head's dimensions it turns, and the scaling rule.

    `parameters` are the rule's numbers and words by their Hugging Face names, sorted, so that equal rules
    compare equal.
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    parameters: tuple[tuple[str, float | str | tuple[float, ...]], ...] = ()


@dataclass(frozen=True)
class LayerSpec:
    """One layer's KV: `heads` KV heads of `k_dim` and `v_dim` numbers a token.

    A latent layer has one head of k_dim = latent rank + rotary part and v_dim 0. `window` is the number of
    last tokens a sliding layer attends to, itself included; None elsewhere. `rope` is None where keys are not
    rotated.
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    rope: RopeSpec | None = None

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise UnsupportedModel(f"layer kind {self.kind!r} is not one of {', '.join(LAYER_KINDS)}")
        if self.heads < 1 or self.k_dim < 1 or self.v_dim < 0:
            raise UnsupportedModel(f"a layer needs heads and sizes above zero, got {self}")
        if (self.window is None) == (self.kind == "sliding"):
            raise UnsupportedModel(f"a window belongs to a sliding layer and to no other, got {self}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, k_dim, v_dim): layers of equal shape share a tensor."""
        return (self.heads, self.k_dim, self.v_dim)


@dataclass(frozen=True)
class Slice:
    """The part of a block held by one rank: layers [layer_start, layer_stop), and of every layer's heads the
    share from head_start / head_parts to head_stop / head_parts."""

    layer_start: int
    layer_stop: int
    head_start: int = 0
    head_stop: int = 1
    head_parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.layer_start < self.layer_stop:
            raise ValueError(f"a slice needs at least one layer, got {self.layer_start}:{self.layer_stop}")
        if not 0 <= self.head_start < self.head_stop <= self.head_parts:
            raise ValueError(f"not a share of heads: {self.head_start}-{self.head_stop} of {self.head_parts}")
        low, high = Fraction(self.head_start, self.head_parts), Fraction(self.head_stop, self.head_parts)
        parts = low.denominator * high.denominator // _gcd(low.denominator, high.denominator)
        object.__setattr__(self, "head_start", int(low * parts))
        object.__setattr__(self, "head_stop", int(high * parts))
        object.__setattr__(self, "head_parts", parts)

    @property
    def text(self) -> str:
        """The slice's name in object names and headers: `l0-30_h0-1of1`."""
        return f"l{self.layer_start}-{self.layer_stop}_h{self.head_start}-{self.head_stop}of{self.head_parts}"

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> Slice:
        """The inverse of `text`; raises ValueError."""
        try:
            layers, heads = text.split("_")
            first, last = layers.removeprefix("l").split("-")
            share, parts = heads.removeprefix("h").split("of")
            low, high = share.split("-")
            parsed = cls(int(first), int(last), int(low), int(high), int(parts))
        except ValueError as error:
            raise ValueError(f"not a slice: {text!r}") from error
        if parsed.text != text:
            raise ValueError(f"not a slice in its shortest form: {text!r}")
        return parsed

    def heads(self, total: int) -> range:
        """The heads of a layer of `total` heads that the slice covers; raises ValueError where it would cut
        one.
        """
        low, high = self.head_start * total, self.head_stop * total
        if low % self.head_parts or high % self.head_parts:
            raise ValueError(f"the slice {self.text} does not divide {total} heads evenly")
        return range(low // self.head_parts, high // self.head_parts)

    def covers(self, layer: int) -> bool:
        return self.layer_start <= layer < self.layer_stop


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal shape, kept in one tensor each for K and V: their indices, and the shape."""

    index: int
    layers: tuple[int, ...]
    heads: int
    k_dim: int
    v_dim: int


def layer_groups(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """The layer groups of a model, in order of first appearance."""
    # Asked for every block, mostly of one and the same tuple, which is slow to hash: known by identity.
    known = _grouped.get(id(layers))
    if known is None or known[0] is not layers:
        if len(_grouped) >= GROUPED:
            _grouped.clear()
        known = _grouped[id(layers)] = (layers, _group(layers))
    return known[1]


GROUPED = 64
_grouped: dict[int, tuple[tuple[LayerSpec, ...], tuple[LayerGroup, ...]]] = {}


def _group(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    members: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.shape, []).append(index)
    return tuple(
        LayerGroup(number, tuple(indices), *shape) for number, (shape, indices) in enumerate(members.items())
    )


@dataclass(frozen=True)
class ModelSpec:
    """A model as the cache sees it. `kin`, `variant` and `adapter` are digests (see retain.fingerprint)."""

    name: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    kin: bytes
    variant: bytes
    adapter: bytes | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedModel(
                f"KV of dtype {self.dtype!r} cannot be kept; known are {', '.join(DTYPES)}"
            )
        if not self.layers:
            raise UnsupportedModel(f"the model {self.name!r} has no layers")

    @property
    def whole(self) -> Slice:
        """The slice that holds every layer and head."""
        return Slice(0, len(self.layers))

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token, all layers, uncompressed."""
        return sum(layer.heads * (layer.k_dim + layer.v_dim) for layer in self.layers) * DTYPES[self.dtype]

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self.layers)


def runs(layers: tuple[LayerSpec, ...]) -> Iterator[tuple[int, LayerSpec]]:
    """Equal neighbours counted: (how many, which)."""
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            yield index - start, layers[start]
            start = index
