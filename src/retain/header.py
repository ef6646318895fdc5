"""The header of a stored object: what the block says of itself, as the JSON head of a safetensors file.

Everything read here is untrusted: sizes are bounded before anything is allocated, and every field is checked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import xxhash

from retain.errors import ForeignObject, InvalidObject
from retain.identity import KEY_BYTES, Media
from retain.model import DTYPES, LayerSpec, RopeSpec, Slice, runs

FORMAT = "retain/1"
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 1 << 14
MAX_LAYERS = 1 << 12
MAX_TOKENS = 1 << 20
ALIGNMENT = 64
FIDELITIES = ("exact", "kin", "lossy", "fused")

_OPENING = b'{"__metadata__":{"checksum":"'
_BLANK = b"0" * 16
CHECKSUM_AT = 8 + len(_OPENING)
"""Where in an object the 16 digits of its header's checksum begin."""

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
_CODEC = re.compile(r"[a-z0-9-]{1,32}\Z")
_KEY = re.compile("[0-9a-f]{64}")
_FORM = re.compile(r"[0-9a-f]{32}\.[a-z0-9_-]+\.[a-z0-9-]{1,32}(\.[0-9a-f]{32})?")


@dataclass(frozen=True)
class BlockHeader:
    """What a block says of itself. Digests are 32 bytes; positions and counts are in tokens.

    `first` is the absolute position of the first token; `media` are relative to it. `fidelity` says how the
    numbers came about, `lineage` is the digest of the non-exact prefix they were computed on, None for an
    exact one.
    """

    key: bytes
    parent: bytes
    space: bytes
    content: bytes
    kin: bytes
    variant: bytes
    adapter: bytes | None
    model: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    first: int
    count: int
    slice: Slice
    media: tuple[Media, ...] = ()
    codec: str = "raw"
    parameters: str = ""
    fidelity: str = "exact"
    lineage: bytes | None = None
    producer: str = ""

    @property
    def name(self) -> str:
        """The name under which the object is kept."""
        return object_name(self.key, self.variant, self.slice, self.codec, self.lineage)


def object_name(key: bytes, variant: bytes, part: Slice, codec: str, lineage: bytes | None = None) -> str:
    """`key.form`: the object's name in every store. Digests after the key are cut to 16 bytes; the header has
    them whole.
    """
    return f"{key.hex()}.{form_of(variant, part, codec, lineage)}"


def form_of(variant: bytes, part: Slice, codec: str, lineage: bytes | None = None) -> str:
    """The part of an object's name behind the key: which variant, slice, codec and lineage."""
    form = f"{variant[:16].hex()}.{part.text}.{codec}"
    return form if lineage is None else f"{form}.{lineage[:16].hex()}"


def split_name(name: str) -> tuple[bytes, str]:
    """An object's key and form from its name; raises ValueError for a name that is none."""
    key, _, form = name.partition(".")
    if not _KEY.fullmatch(key) or not _FORM.fullmatch(form):
        raise ValueError(f"not the name of a block: {name!r}")
    Slice.parse(form.split(".")[1])
    return bytes.fromhex(key), form


@dataclass(frozen=True)
class Tensor:
    """A tensor in an object: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Frame:
    """A parsed head: the block's header, tensors in file order, their checksums, where the data starts."""

    header: BlockHeader
    tensors: tuple[Tensor, ...]
    checksums: Mapping[str, int]
    data_start: int

    @property
    def size(self) -> int:
        """The size of the whole object in bytes."""
        return self.data_start + sum(tensor.size for tensor in self.tensors)


def render_frame(header: BlockHeader, tensors: Sequence[Tensor], checksums: Mapping[str, int]) -> bytes:
    """The head of an object: its length depends on header and tensors alone, not on the checksums."""
    document: dict[str, Any] = {"__metadata__": {"checksum": _BLANK.decode(), **_metadata(header)}}
    document["__metadata__"]["xxh3"] = " ".join(f"{checksums[tensor.name]:016x}" for tensor in tensors)
    at = 0
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would have {len(text)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    head = struct.pack("<Q", len(text)) + text
    seal = f"{xxhash.xxh3_64_intdigest(head):016x}".encode()
    at = 8 + len(_OPENING)
    return head[:at] + seal + head[at + len(_BLANK) :]


def has_opening(head: bytes) -> bool:
    """Whether the first bytes of an object are those of one of Retain's."""
    return head[8:CHECKSUM_AT] == _OPENING and len(head) >= CHECKSUM_AT + 16


def parse_frame(data: memoryview) -> Frame:
    """The head of an object, from its first bytes (at least the whole head). Raises InvalidObject."""
    if len(data) < 8:
        raise InvalidObject(f"the object has {len(data)} bytes, too few for a header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER_BYTES:
        raise InvalidObject(f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if len(data) < 8 + length:
        raise InvalidObject(f"the object ends inside its header of {length} bytes")
    head = bytearray(data[: 8 + length])
    at = 8 + len(_OPENING)
    if head[8:at] != _OPENING or len(head) < at + 16:
        raise InvalidObject("the object does not begin like one of Retain's")
    seal = bytes(head[at : at + 16])
    head[at : at + 16] = _BLANK
    if seal != f"{xxhash.xxh3_64_intdigest(head):016x}".encode():
        raise InvalidObject("the checksum of the header does not match: its bytes are damaged")
    try:
        document = msgspec.json.decode(head[8:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
        tensors = _tensors(document)
        header = _header(metadata)
        sums = metadata.get("xxh3", "").split(" ") if tensors else []
        if len(sums) != len(tensors) or any(len(value) != 16 for value in sums):
            raise InvalidObject(f"the header has {len(sums)} checksums for {len(tensors)} tensors")
        checksums = {tensor.name: int(value, 16) for tensor, value in zip(tensors, sums, strict=True)}
    except InvalidObject:
        raise
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidObject(f"the header cannot be read: {type(error).__name__}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("retain"):
            raise InvalidObject(f"the header states an impossible layout: {error}") from error
        raise
    return Frame(header, tensors, checksums, 8 + length)


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]


def _tensors(document: dict[str, msgspec.Raw]) -> tuple[Tensor, ...]:
    if len(document) > MAX_TENSORS:
        raise InvalidObject(f"the object claims {len(document)} tensors; at most {MAX_TENSORS} are allowed")
    tensors = []
    at = 0
    for name, raw in document.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        if entry.dtype not in _ITEM_BYTES:
            raise InvalidObject(f"tensor {name[:80]!r} has unknown dtype {entry.dtype[:20]!r}")
        tensor = Tensor(name, entry.dtype, tuple(entry.shape))
        if entry.data_offsets != (at, at + tensor.size):
            raise InvalidObject(f"tensor {name[:80]!r} does not lie where its shape says")
        at += tensor.size
        tensors.append(tensor)
    if at > 1 << 62:
        raise InvalidObject("the object claims more bytes than any store can hold")
    return tuple(tensors)


def _metadata(header: BlockHeader) -> dict[str, str]:
    return {
        "format": FORMAT,
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "space": header.space.hex(),
        "content": header.content.hex(),
        "kin": header.kin.hex(),
        "variant": header.variant.hex(),
        "adapter": header.adapter.hex() if header.adapter is not None else "",
        "model": header.model,
        "architecture": header.architecture,
        "layers": layers_text(header.layers),
        "dtype": header.dtype,
        "first": str(header.first),
        "count": str(header.count),
        "slice": header.slice.text,
        "media": json.dumps(
            [[m.position, m.length, m.digest.hex()] for m in header.media], separators=(",", ":")
        ),
        "codec": header.codec,
        "parameters": header.parameters,
        "fidelity": header.fidelity,
        "lineage": header.lineage.hex() if header.lineage is not None else "",
        "features": "",
        "producer": header.producer,
    }


def _header(metadata: dict[str, str]) -> BlockHeader:
    if metadata["format"] != FORMAT:
        raise ForeignObject(f"the object has format {metadata['format'][:40]!r}; this version reads {FORMAT}")
    if metadata["features"]:
        raise ForeignObject(
            f"the object needs features this version does not have: {metadata['features'][:80]}"
        )
    if metadata["dtype"] not in DTYPES:
        raise InvalidObject(f"the object's KV has unknown dtype {metadata['dtype'][:20]!r}")
    if not _CODEC.match(metadata["codec"]):
        raise InvalidObject(f"the object names an impossible codec {metadata['codec'][:40]!r}")
    if metadata["fidelity"] not in FIDELITIES:
        raise InvalidObject(f"the object has unknown fidelity {metadata['fidelity'][:20]!r}")
    first, count = _number(metadata["first"]), _number(metadata["count"])
    if not 1 <= count <= MAX_TOKENS or first >= 1 << 31:
        raise InvalidObject(f"the object claims {count} tokens at position {first}")
    layers = layers_from_text(metadata["layers"])
    part = Slice.parse(metadata["slice"])
    if part.layer_stop > len(layers):
        raise InvalidObject(f"the slice {part.text} does not fit a model of {len(layers)} layers")
    return BlockHeader(
        key=_digest(metadata["key"]),
        parent=_digest(metadata["parent"]),
        space=_digest(metadata["space"]),
        content=_digest(metadata["content"]),
        kin=_digest(metadata["kin"]),
        variant=_digest(metadata["variant"]),
        adapter=_digest(metadata["adapter"]) if metadata["adapter"] else None,
        model=metadata["model"],
        architecture=metadata["architecture"],
        layers=layers,
        dtype=metadata["dtype"],
        first=first,
        count=count,
        slice=part,
        media=_media(metadata["media"]),
        codec=metadata["codec"],
        parameters=metadata["parameters"],
        fidelity=metadata["fidelity"],
        lineage=_digest(metadata["lineage"]) if metadata["lineage"] else None,
        producer=metadata["producer"],
    )


def _digest(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != KEY_BYTES or value.hex() != text:
        raise ValueError(f"not a digest: {text[:80]!r}")
    return value


def _number(text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", text):
        raise ValueError(f"not a count: {text[:40]!r}")
    return int(text)


_RopeRow = tuple[float, int, str, list[tuple[str, float | str | list[float]]]]
_LayerRow = tuple[int, str, int, int, int, int | None, _RopeRow | None]


def layers_text(layers: tuple[LayerSpec, ...]) -> str:
    """A model's layers as text: runs of equal ones, as docs/format.md describes."""
    rows = [
        [
            count,
            layer.kind,
            layer.heads,
            layer.k_dim,
            layer.v_dim,
            layer.window,
            layer.rope
            and [layer.rope.theta, layer.rope.rotary_dim, layer.rope.scaling, layer.rope.parameters],
        ]
        for count, layer in runs(layers)
    ]
    return json.dumps(rows, separators=(",", ":"))


@lru_cache(maxsize=16)
def layers_from_text(text: str) -> tuple[LayerSpec, ...]:
    """The layers of a header's text. Raises InvalidObject, ValueError, UnsupportedModel or msgspec's own."""
    layers: list[LayerSpec] = []
    for count, kind, heads, k_dim, v_dim, window, rope in msgspec.json.decode(text, type=list[_LayerRow]):
        if not 1 <= count <= MAX_LAYERS - len(layers):
            raise InvalidObject(f"the object claims more than {MAX_LAYERS} layers")
        if max(heads, k_dim, v_dim) > 1 << 20:
            raise InvalidObject(f"the object claims a layer of {heads} heads of {k_dim} and {v_dim}")
        turn = None
        if rope is not None:
            theta, rotary_dim, scaling, parameters = rope
            fixed = tuple(
                (key, tuple(value) if isinstance(value, list) else value) for key, value in parameters
            )
            turn = RopeSpec(theta, rotary_dim, scaling, fixed)
        layers.extend([LayerSpec(kind, heads, k_dim, v_dim, window, turn)] * count)
    return tuple(layers)


def _media(text: str) -> tuple[Media, ...]:
    if text == "[]":
        return ()
    rows = msgspec.json.decode(text, type=list[tuple[int, int, str]])
    return tuple(Media(position, length, bytes.fromhex(value)) for position, length, value in rows)
