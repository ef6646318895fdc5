"""Block: canonical arrays and the object format they are kept in, a valid safetensors file (docs/format.md).

`header.py` knows the bytes of the header; this module joins it with the numbers: building, reading, cutting,
assembling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from retain.codecs import CODECS, Codec
from retain.codecs.base import Array, container
from retain.errors import InvalidObject
from retain.fidelity import decoded_lineage, held_codec
from retain.header import (
    BlockHeader,
    Frame,
    Tensor,
    parse_frame,
    render_frame,
)
from retain.identity import Media, Tokens, as_tokens, block_key, content_key
from retain.model import LayerGroup, ModelSpec, Slice, layer_groups
from retain.stores.base import Buffer

MAX_DECODED_BYTES = 1 << 36
"""The largest block that is decoded without the reader having said what it expects: 64 GiB."""

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "U8": np.uint8}


@dataclass(frozen=True, eq=False)
class Block:
    """The KV of consecutive tokens: what it is, the tokens, and one K and one V array a layer group.

    `arrays` maps `k` and `v` (`k.0`, `v.0`, `k.1` ... where layer shapes differ) to `[layers, heads, tokens,
    head_dim]`; bfloat16 numbers are held as uint16. A block read from a cache is a read-only view, valid
    while its lease lasts.
    """

    header: BlockHeader
    tokens: Tokens
    arrays: Mapping[str, Array]

    def layer(self, index: int) -> tuple[Array, Array | None]:
        """K and V of model layer `index`, each `[heads, tokens, head_dim]`; V is None for a latent layer."""
        for group, rows in group_rows(self.header):
            if index in rows:
                suffix = "" if len(layer_groups(self.header.layers)) == 1 else f".{group.index}"
                row = rows.index(index)
                value = self.arrays.get(f"v{suffix}")
                return self.arrays[f"k{suffix}"][row], None if value is None else value[row]
        raise IndexError(f"layer {index} is not in the slice {self.header.slice.text}")

    def encode(self, codec: Codec) -> list[Buffer]:
        """The object's bytes as buffers to be written one after the other; array buffers are not copied for
        raw.
        """
        encoded = codec.encode(self.arrays, self.tokens, self.header)
        header = replace(self.header, codec=codec.name, parameters=encoded.parameters)
        if not encoded.exact:
            header = replace(header, fidelity="lossy")
        contents: dict[str, Array] = {"tokens": self.tokens.astype("<u4", copy=False)}
        contents.update((name, np.ascontiguousarray(array)) for name, array in encoded.streams.items())
        tensors = [
            Tensor(name, _safetensors_dtype(name, array, header), array.shape)
            for name, array in contents.items()
        ]
        buffers = [_bytes(array) for array in contents.values()]
        sums = {name: _xxh3(data) for name, data in zip(contents, buffers, strict=True)}
        return [render_frame(header, tensors, sums), *buffers]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Block):
            return NotImplemented
        return (
            self.header == other.header
            and np.array_equal(self.tokens, other.tokens)
            and self.arrays.keys() == other.arrays.keys()
            and all(_bytes(self.arrays[name]) == _bytes(other.arrays[name]) for name in self.arrays)
        )

    __hash__ = None  # type: ignore[assignment]


def make_header(
    spec: ModelSpec,
    *,
    space: bytes,
    parent: bytes,
    tokens: Tokens,
    first: int,
    slice: Slice | None = None,
    media: Sequence[Media] = (),
    fidelity: str = "exact",
    lineage: bytes | None = None,
    producer: str = "",
) -> BlockHeader:
    """The header of a raw block of `tokens` at positions `first` onwards, with its keys computed.

    `media` are in absolute positions, as in a Chain; the header keeps them relative to the block.
    """
    relative = tuple(
        Media(m.position - first, m.length, m.digest)
        for m in sorted(media)
        if m.position < first + tokens.size and m.position + m.length > first
    )
    return BlockHeader(
        key=block_key(parent, tokens, relative),
        parent=parent,
        space=space,
        content=content_key(tokens, relative),
        kin=spec.kin,
        variant=spec.variant,
        adapter=spec.adapter,
        model=spec.name,
        architecture=spec.architecture,
        layers=spec.layers,
        dtype=spec.dtype,
        first=first,
        count=int(tokens.size),
        slice=slice or spec.whole,
        media=relative,
        codec="raw",
        fidelity=fidelity,
        lineage=lineage,
        producer=producer,
    )


def group_rows(header: BlockHeader) -> list[tuple[LayerGroup, tuple[int, ...]]]:
    """The layer groups of which the header's slice holds something, each with its rows' model layers."""
    rows = []
    for group in layer_groups(header.layers):
        held = tuple(layer for layer in group.layers if header.slice.covers(layer))
        if held:
            rows.append((group, held))
    return rows


def array_shapes(header: BlockHeader) -> dict[str, tuple[int, int, int, int]]:
    """The arrays of a block with this header: name to `[layers, heads, tokens, head_dim]`."""
    single = len(layer_groups(header.layers)) == 1
    shapes = {}
    for group, rows in group_rows(header):
        heads = len(header.slice.heads(group.heads)) if group.heads > 1 else 1
        suffix = "" if single else f".{group.index}"
        shapes[f"k{suffix}"] = (len(rows), heads, header.count, group.k_dim)
        if group.v_dim:
            shapes[f"v{suffix}"] = (len(rows), heads, header.count, group.v_dim)
    return shapes


@dataclass(frozen=True)
class RawLayout:
    """Where a raw block's parts lie in its object: written in place, without a second copy."""

    header: BlockHeader
    tensors: tuple[Tensor, ...]
    data_start: int
    size: int

    @property
    def frame(self) -> Frame:
        """The head that an object of this layout has, without its checksums."""
        return Frame(self.header, self.tensors, {}, self.data_start)

    def views(self, buffer: memoryview) -> tuple[Tokens, dict[str, Array]]:
        """The token vector and the arrays inside an object's buffer; writable if the buffer is."""
        found = _tensor_views(buffer, self.tensors, self.data_start)
        return found.pop("tokens"), found

    def write_header(self, buffer: memoryview) -> None:
        """Checksum what lies in `buffer` and write the object's header before it."""
        views = _tensor_views(buffer, self.tensors, self.data_start)
        sums = {name: _xxh3(_bytes(array)) for name, array in views.items()}
        head = render_frame(self.header, self.tensors, sums)
        buffer[: len(head)] = head


def raw_layout(header: BlockHeader) -> RawLayout:
    """The layout of a raw object of the block with this header, decoded: its lineage then tells of a lossy
    codec."""
    codec = held_codec(header.codec, header.parameters)
    lossy = codec != "raw" and header.fidelity == "lossy"
    lineage = decoded_lineage(codec, header.lineage) if lossy else header.lineage
    header = replace(header, codec="raw", parameters="", lineage=lineage)
    kind = _SAFETENSORS[header.dtype]
    tensors = [Tensor("tokens", "U32", (header.count,))]
    tensors.extend(Tensor(name, kind, shape) for name, shape in array_shapes(header).items())
    head = render_frame(header, tensors, {tensor.name: 0 for tensor in tensors})
    return RawLayout(header, tuple(tensors), len(head), len(head) + sum(tensor.size for tensor in tensors))


@dataclass(frozen=True)
class Expected:
    """What a reader knows of the object it asks for; any difference makes the object invalid."""

    key: bytes
    spec: ModelSpec
    count: int | None = None
    slice: Slice | None = None

    def check(self, header: BlockHeader) -> None:
        """Raise InvalidObject, naming the first field that differs."""
        wanted: dict[str, Any] = {
            "key": self.key,
            "kin": self.spec.kin,
            "variant": self.spec.variant,
            "adapter": self.spec.adapter,
            "layers": self.spec.layers,
            "dtype": self.spec.dtype,
        }
        if self.count is not None:
            wanted["count"] = self.count
        if self.slice is not None:
            wanted["slice"] = self.slice
        for field, value in wanted.items():
            if getattr(header, field) != value:
                raise InvalidObject(f"the object is another one than asked for: its {field} differs")


def open_object(data: memoryview) -> tuple[Frame, dict[str, Array]]:
    """Parse an object and view its tensors, without verifying their checksums. Raises InvalidObject."""
    frame = parse_frame(data)
    if len(data) != frame.size:
        raise InvalidObject(f"the object has {len(data)} bytes, its header says {frame.size}")
    return frame, object_views(data, frame)


def object_views(data: memoryview, frame: Frame) -> dict[str, Array]:
    """The tensors of an object whose head is known."""
    return _tensor_views(data, frame.tensors, frame.data_start)


def verify_object(data: memoryview) -> tuple[Frame, dict[str, Array]]:
    """Parse an object and verify everything in it: checksums, token ids against key and content key, tensor
    shapes.

    Raises InvalidObject with the reason.
    """
    frame, views = open_object(data)
    for name, array in views.items():
        if _xxh3(_bytes(array)) != frame.checksums[name]:
            raise InvalidObject(f"the checksum of tensor {name} does not match: its bytes are damaged")
    header = frame.header
    tokens = views.get("tokens")
    if tokens is None or tokens.dtype != np.uint32 or tokens.shape != (header.count,):
        raise InvalidObject(f"the object does not hold the ids of its {header.count} tokens")
    if block_key(header.parent, tokens, header.media) != header.key:
        raise InvalidObject("the object's token ids do not give its key")
    if content_key(tokens, header.media) != header.content:
        raise InvalidObject("the object's token ids do not give its content key")
    if header.codec == "raw":
        kind = _SAFETENSORS[header.dtype]
        expected: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("U32", (header.count,))}
        expected.update((name, (kind, shape)) for name, shape in array_shapes(header).items())
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in frame.tensors} != expected:
            raise InvalidObject("the object's tensors do not fit the layout that its header states")
    return frame, views


def decode(data: memoryview, expected: Expected | None = None) -> Block:
    """The block in an object's bytes, verified. Raw blocks are views of `data`; others are decoded into new
    arrays.
    """
    frame, views = verify_object(data)
    header = frame.header
    if expected is not None:
        expected.check(header)
    tokens = views.pop("tokens")
    if header.codec == "raw":
        return Block(header, tokens, views)
    layout = raw_layout(header)
    if expected is None and layout.size > MAX_DECODED_BYTES:
        raise InvalidObject(f"the object claims to decode to {layout.size} bytes")
    buffer = memoryview(bytearray(layout.size))
    return decode_into(frame, tokens, views, layout, buffer)


def decode_into(
    frame: Frame, tokens: Tokens, streams: Mapping[str, Array], layout: RawLayout, buffer: memoryview
) -> Block:
    """Decode a verified object's streams into `buffer`, laid out as `layout` says. Raises InvalidObject."""
    known = CODECS.get(frame.header.codec)
    if known is None:
        raise InvalidObject(
            f"the object is encoded with {frame.header.codec!r}, which this version does not know"
        )
    token_view, arrays = layout.views(buffer)
    np.copyto(token_view, tokens)
    known.decode(streams, tokens, frame.header, arrays)
    return Block(layout.header, token_view, arrays)


def cut(block: Block, wanted: Slice) -> Block:
    """The part of `block` that lies in `wanted`, as views. Raises ValueError where the slices do not overlap
    so.
    """
    return assemble([block], wanted)


def assemble(parts: Sequence[Block], wanted: Slice, into: Mapping[str, Array] | None = None) -> Block:
    """The slice `wanted` put together from slices of one block, however they were split.

    Copied `into` arrays where such are given; else views where one part holds everything, or new arrays.
    Raises ValueError when something is missing.
    """
    if not parts:
        raise ValueError("nothing to assemble")
    model = parts[0].header
    header = replace(model, slice=wanted)
    arrays: dict[str, Array] = {}
    for name, shape in array_shapes(header).items():
        group = _group_of(header, name)
        rows = tuple(layer for layer in group.layers if wanted.covers(layer))
        heads = wanted.heads(group.heads) if group.heads > 1 else range(1)
        pieces = []
        for part in parts:
            if (
                part.header.key != model.key
                or part.header.layers != model.layers
                or part.header.dtype != model.dtype
            ):
                raise ValueError("slices of different blocks cannot be assembled")
            piece = _piece(part, name, group, rows, heads)
            if piece is not None:
                pieces.append(piece)
        arrays[name] = _join(pieces, shape, name, None if into is None else into[name])
    return Block(header, parts[0].tokens, arrays)


_Piece = tuple[slice, slice, Array]


def _piece(part: Block, name: str, group: LayerGroup, rows: tuple[int, ...], heads: range) -> _Piece | None:
    held_rows = [layer for layer in group.layers if part.header.slice.covers(layer)]
    held_heads = part.header.slice.heads(group.heads) if group.heads > 1 else range(1)
    common = [layer for layer in rows if layer in held_rows]
    low, high = max(heads.start, held_heads.start), min(heads.stop, held_heads.stop)
    if not common or low >= high:
        return None
    source = part.arrays[name][
        held_rows.index(common[0]) : held_rows.index(common[-1]) + 1,
        low - held_heads.start : high - held_heads.start,
    ]
    target_rows = slice(rows.index(common[0]), rows.index(common[-1]) + 1)
    return target_rows, slice(low - heads.start, high - heads.start), source


def _join(pieces: list[_Piece], shape: tuple[int, ...], name: str, into: Array | None) -> Array:
    for _, _, source in pieces:
        if source.shape == shape and into is None:
            return source
    covered = np.zeros(shape[:2], bool)
    for rows, heads, _ in pieces:
        covered[rows, heads] = True
    if not covered.all():
        raise ValueError(f"the slices at hand do not cover tensor {name}")
    joined = np.empty(shape, pieces[0][2].dtype) if into is None else into
    for rows, heads, source in pieces:
        joined[rows, heads] = source
    return joined


def _group_of(header: BlockHeader, name: str) -> LayerGroup:
    groups = layer_groups(header.layers)
    return groups[int(name.partition(".")[2] or 0)]


def _tensor_views(buffer: memoryview, tensors: Sequence[Tensor], data_start: int) -> dict[str, Array]:
    # Slices of one array, so that all views share one base object: its life is that of the last view (see
    # cache.load).
    whole = np.frombuffer(buffer, np.uint8)
    views: dict[str, Array] = {}
    at = data_start
    for tensor in tensors:
        views[tensor.name] = whole[at : at + tensor.size].view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
        at += tensor.size
    return views


def _safetensors_dtype(name: str, array: Array, header: BlockHeader) -> str:
    if name == "tokens":
        return "U32"
    if array.dtype == np.uint8:
        return "U8"
    if array.dtype != container(header.dtype):
        raise TypeError(f"tensor {name} has dtype {array.dtype}, but the block's KV is {header.dtype}")
    return _SAFETENSORS[header.dtype]


def _bytes(array: Array) -> memoryview:
    if array.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _xxh3(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data)


def block_of(header: BlockHeader, tokens: Sequence[int] | Tokens, arrays: Mapping[str, Array]) -> Block:
    """A block from parts, its shapes and dtypes checked. Raises ValueError."""
    ids = as_tokens(tokens)
    shapes = array_shapes(header)
    if ids.size != header.count or arrays.keys() != shapes.keys():
        raise ValueError(
            f"a block of {header.count} tokens needs arrays {sorted(shapes)}, got {sorted(arrays)}"
        )
    for name, shape in shapes.items():
        if arrays[name].shape != shape or arrays[name].dtype != container(header.dtype):
            raise ValueError(
                f"array {name} has shape {arrays[name].shape} and dtype {arrays[name].dtype}, "
                f"expected {shape} and {container(header.dtype)}"
            )
    return Block(header, ids, dict(arrays))
