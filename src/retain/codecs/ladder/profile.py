"""The profile of a model: what the ladder knows of its KV, learnt once and named by its digest in objects.

A profile is a safetensors file. Its bytes are written in one way only, and its digest is their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from retain._native import LadderTables
from retain.codecs.base import Array
from retain.codecs.ladder.levels import CLASSES, CONTEXTS, LEVELS, SYMBOLS
from retain.codecs.ladder.rope import Rotation
from retain.codecs.ladder.tensors import from_file, to_file
from retain.errors import InvalidProfile, UnsupportedModel
from retain.header import layers_from_text, layers_text
from retain.model import LayerGroup, LayerSpec, layer_groups

FORMAT = "retain-profile/1"
MAX_FILE_BYTES = 1 << 34
MAX_WIDTH = 1 << 15

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of one array of a block (`k`, `v`, `k.0` ...)."""

    array: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Part:
    """What is transformed together: the numbers of some layers, all heads, K or V or both, of one token.

    They are in order (segment, row, head, dim); `width` is how many. Components are
    `y = basis @ (weight * (x - mean))`, where keys are free of positions.
    `basis` float16 `[width, width]` has orthonormal rows, by falling variance of y; `mean` and `weight` are
    float32 `[width]`; `classes` uint8 `[width]` are the classes expected. `probe` float32
    `[rows, heads, k_dim + 3]` of the first segment's layers gives a token's importance, the log2 of its
    squared gradient, from (k, ln|k|, ln|v|, 1); `center` is the mean of that. `predicted` float16
    `[token ids, some components]` are the components known from the token alone.
    """

    segments: tuple[Segment, ...]
    mean: Floats
    weight: Floats
    basis: Array
    classes: npt.NDArray[np.uint8]
    probe: Floats | None = None
    center: float = 0.0
    predicted: Array | None = None

    @property
    def width(self) -> int:
        return int(self.mean.size)

    @cached_property
    def inverse(self) -> Floats:
        """One over every weight."""
        return np.asarray(1 / self.weight)


@dataclass(frozen=True, eq=False)
class Tables:
    """The entropy coder's tables: see docs/codecs.md. Frequencies of a row sum to 4096.

    `frequencies` uint16 `[43, 128]`: the numbers of `tiny` by class, then a token's step class, its energy,
    and a component's class less the one expected. `splits` uint16 `[3, 40, 4, 2]`: where 0 and +1 start among
    the digits of a refinement. `first` uint8 `[4]`: below this class a component is all zero at a level.
    """

    frequencies: npt.NDArray[np.uint16]
    splits: npt.NDArray[np.uint16]
    first: npt.NDArray[np.uint8]

    @cached_property
    def native(self) -> LadderTables:
        """The tables made ready for coding. Raises InvalidProfile where they cannot be coded with."""
        try:
            return LadderTables(self.frequencies, self.splits, self.first)
        except (ValueError, TypeError) as error:
            raise InvalidProfile(f"the profile's tables cannot be used: {error}") from error


@dataclass(frozen=True, eq=False)
class Profile:
    """A model's profile.

    `step` is that of `fine`, in components; the tokens at positions below `sinks` are kept as they are.
    `alpha` is how many half-octaves the step shrinks when importance doubles. `declared` maps a level to
    (mean KL, bits per value) as measured when the profile was made. `tables` is None only while the profile
    is being learnt.
    """

    kin: bytes
    model: str
    layers: tuple[LayerSpec, ...]
    sinks: int
    step: float
    parts: tuple[Part, ...]
    alpha: float = 0.35
    tables: Tables | None = None
    token_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    declared: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the profile's file."""
        return hashlib.sha256(self.to_bytes()).digest()

    @property
    def known_tables(self) -> Tables:
        """The tables. Raises InvalidProfile for a profile that is still being learnt."""
        if self.tables is None:
            raise InvalidProfile(f"the profile of {self.model} has no tables yet")
        return self.tables

    @property
    def coder(self) -> LadderTables:
        """The entropy coder of the tables."""
        return self.known_tables.native

    def group(self, array: str) -> LayerGroup:
        """The layers of equal shape that an array holds."""
        return group_of(self.layers, array)

    @cached_property
    def rotations(self) -> dict[str, Rotation]:
        """The rotary positions of each array of keys. Raises UnsupportedModel where they cannot be undone."""
        names = (name for name in self.array_shapes() if name.startswith("k"))
        return {name: Rotation([self.layers[index] for index in self.group(name).layers]) for name in names}

    def array_shapes(self) -> dict[str, tuple[int, int, int]]:
        """The arrays of a block of this model, in order: (layers, heads, dim) of each."""
        groups = layer_groups(self.layers)
        shapes = {}
        for group in groups:
            suffix = "" if len(groups) == 1 else f".{group.index}"
            shapes[f"k{suffix}"] = (len(group.layers), group.heads, group.k_dim)
            if group.v_dim:
                shapes[f"v{suffix}"] = (len(group.layers), group.heads, group.v_dim)
        return shapes

    def to_bytes(self) -> bytes:
        """The profile as a file. Raises InvalidProfile for one without tables."""
        tables = self.known_tables
        tensors: dict[str, Array] = {
            "frequencies": tables.frequencies,
            "splits": tables.splits,
            "first": tables.first,
            "token_ids": self.token_ids,
        }
        rows = []
        for index, part in enumerate(self.parts):
            arrays = {"mean": part.mean, "weight": part.weight, "basis": part.basis, "classes": part.classes}
            optional = {"probe": part.probe, "predicted": part.predicted}
            arrays.update((name, array) for name, array in optional.items() if array is not None)
            tensors.update((f"{index}.{name}", array) for name, array in arrays.items())
            rows.append(
                {"segments": [[s.array, s.start, s.stop] for s in part.segments], "center": part.center}
            )
        metadata = {
            "format": FORMAT,
            "kin": self.kin.hex(),
            "model": self.model,
            "layers": layers_text(self.layers),
            "sinks": str(self.sinks),
            "step": repr(float(self.step)),
            "alpha": repr(float(self.alpha)),
            "parts": json.dumps(rows, separators=(",", ":")),
            "declared": json.dumps(self.declared, separators=(",", ":"), sort_keys=True),
        }
        return to_file(metadata, tensors)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Profile:
        """The profile in a file's bytes. Raises InvalidProfile."""
        metadata, tensors = from_file(memoryview(data))
        try:
            if metadata["format"] != FORMAT:
                raise InvalidProfile(f"the profile has format {metadata['format'][:40]!r}, not {FORMAT}")
            rows = msgspec.json.decode(metadata["parts"], type=list[_PartRow])
            parts = tuple(_part(index, row, tensors) for index, row in enumerate(rows))
            tables = Tables(tensors.pop("frequencies"), tensors.pop("splits"), tensors.pop("first"))
            made = cls(
                kin=bytes.fromhex(metadata["kin"]),
                model=metadata["model"],
                layers=layers_from_text(metadata["layers"]),
                sinks=int(metadata["sinks"]),
                step=float(metadata["step"]),
                alpha=float(metadata["alpha"]),
                parts=parts,
                tables=tables,
                token_ids=tensors.pop("token_ids"),
                declared=msgspec.json.decode(metadata["declared"], type=dict[str, tuple[float, float]]),
            )
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError, UnsupportedModel) as error:
            raise InvalidProfile(f"the profile cannot be read: {type(error).__name__}: {error}") from error
        if tensors:
            raise InvalidProfile(
                f"the profile holds tensors that nobody knows: {', '.join(sorted(tensors)[:5])}"
            )
        made.__dict__["digest"] = hashlib.sha256(data).digest()
        return made


def save(profile: Profile, path: Path) -> None:
    """Write a profile's file; it appears whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(profile.to_bytes())
    draft.replace(path)


def load(path: Path) -> Profile:
    """Read a profile's file. Raises InvalidProfile, or OSError."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidProfile(f"{path} has {path.stat().st_size} bytes, too many for a profile")
    return Profile.from_bytes(path.read_bytes())


def group_of(layers: tuple[LayerSpec, ...], array: str) -> LayerGroup:
    """The layers of equal shape whose K or V an array of a block holds. Raises InvalidProfile."""
    groups = layer_groups(layers)
    side, dot, number = array.partition(".")
    named = (len(groups) == 1 and not dot) or (
        len(groups) > 1 and number.isdecimal() and int(number) < len(groups)
    )
    if side not in ("k", "v") or not named:
        raise InvalidProfile(f"the model has no array {array[:20]!r}")
    return groups[int(number or 0)]


class _PartRow(msgspec.Struct, forbid_unknown_fields=True):
    segments: list[tuple[str, int, int]]
    center: float


def _part(index: int, row: _PartRow, tensors: dict[str, Array]) -> Part:
    def taken(name: str) -> Array | None:
        return tensors.pop(f"{index}.{name}", None)

    arrays = {name: taken(name) for name in ("mean", "weight", "basis", "classes")}
    if any(array is None for array in arrays.values()):
        raise InvalidProfile(f"part {index} of the profile is not whole")
    segments = tuple(Segment(*segment) for segment in row.segments)
    return Part(segments, **arrays, probe=taken("probe"), center=row.center, predicted=taken("predicted"))  # type: ignore[arg-type]


def _validate(profile: Profile) -> None:
    _ = profile.rotations
    shapes = profile.array_shapes()
    covered = {name: [False] * layers for name, (layers, _, _) in shapes.items()}
    for index, part in enumerate(profile.parts):
        width = 0
        for segment in part.segments:
            rows = covered.get(segment.array, [])
            if not 0 <= segment.start < segment.stop <= len(rows) or any(rows[segment.start : segment.stop]):
                raise InvalidProfile(
                    f"part {index} covers rows of {segment.array} that are not its own: {segment}"
                )
            rows[segment.start : segment.stop] = [True] * (segment.stop - segment.start)
            _, heads, dim = shapes[segment.array]
            width += (segment.stop - segment.start) * heads * dim
        _validate_part(profile, index, part, width)
    if not all(all(rows) for rows in covered.values()):
        raise InvalidProfile("the profile's parts do not cover every layer of the model")
    numbers = (profile.step, profile.alpha)
    if not all(math.isfinite(number) for number in numbers) or profile.step <= 0 or abs(profile.alpha) > 8:
        raise InvalidProfile(f"a profile cannot have the step {profile.step} and alpha {profile.alpha}")
    if len(profile.kin) != 32 or not 0 <= profile.sinks <= 256:
        raise InvalidProfile(
            f"a profile cannot have {profile.sinks} sinks and a kin of {len(profile.kin)} bytes"
        )
    ids = profile.token_ids
    if ids.dtype != np.uint32 or ids.ndim != 1 or not (ids[1:] > ids[:-1]).all():
        raise InvalidProfile("the profile's token ids are not in rising order")
    if any(level not in LEVELS for level in profile.declared):
        raise InvalidProfile(f"the profile declares levels {sorted(profile.declared)}; known are {LEVELS}")
    if profile.tables is not None:
        _validate_tables(profile.tables)


def _validate_part(profile: Profile, index: int, part: Part, width: int) -> None:
    if not 0 < width <= MAX_WIDTH:
        raise InvalidProfile(f"part {index} is {width} numbers wide; at most {MAX_WIDTH} are allowed")
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
        "mean": (np.float32, (width,)),
        "weight": (np.float32, (width,)),
        "basis": (np.float16, (width, width)),
        "classes": (np.uint8, (width,)),
    }
    first = part.segments[0]
    group = profile.group(first.array)
    if part.probe is not None:
        wanted["probe"] = (np.float32, (first.stop - first.start, group.heads, group.k_dim + 3))
    if part.predicted is not None:
        known = part.predicted.shape[1] if part.predicted.ndim == 2 else 0
        wanted["predicted"] = (np.float16, (profile.token_ids.size, min(known, width)))
    for name, (dtype, shape) in wanted.items():
        array = getattr(part, name)
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise InvalidProfile(
                f"{name} of part {index} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}"
            )
        if not np.isfinite(array).all():
            raise InvalidProfile(f"{name} of part {index} holds numbers that are not finite")
    if not (part.weight > 0).all() or not math.isfinite(part.center):
        raise InvalidProfile(f"part {index} has weights that are not above zero")
    if (part.classes >= CLASSES).any():
        raise InvalidProfile(f"part {index} expects classes beyond {CLASSES - 1}")


def _validate_tables(tables: Tables) -> None:
    wanted = {
        "frequencies": (np.uint16, (CLASSES + 3, SYMBOLS)),
        "splits": (np.uint16, (len(LEVELS) - 1, CLASSES, CONTEXTS, 2)),
        "first": (np.uint8, (len(LEVELS),)),
    }
    for name, (dtype, shape) in wanted.items():
        array = getattr(tables, name)
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise InvalidProfile(
                f"the tables' {name} is {array.dtype} {array.shape}, expected {dtype} {shape}"
            )
    _ = tables.native
