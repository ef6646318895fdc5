"""Decoding the ladder on a device of torch's: entropy coding on the CPU, the transform and rotation there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from retain.codecs.base import Array
from retain.codecs.ladder.coder import numbers_of, sinks_of, stream_names
from retain.codecs.ladder.levels import LEVELS, depth
from retain.codecs.ladder.profile import Part, Profile, Segment
from retain.codecs.ladder.quantise import token_steps
from retain.codecs.ladder.transform import place_of, predicted, rotation_of
from retain.errors import InvalidObject, MissingDependency
from retain.identity import Tokens

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingDependency(
        "decoding on a device needs the package 'torch': pip install 'retain[transformers]'"
    ) from error

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Held:
    basis: Tensor
    mean: Tensor
    inverse: Tensor


class DeviceDecoder:
    """Decodes blocks of one profile on one device, where it keeps the profile's bases (as float16).

    Results equal those of `retain.codecs.ladder.coder.decode` but for rounding in the last bits.
    """

    def __init__(self, profile: Profile, device: torch.device) -> None:
        self._profile = profile
        self._device = device
        self._parts = [
            _Held(*(torch.from_numpy(array).to(device) for array in (part.basis, part.mean, part.inverse)))
            for part in profile.parts
        ]

    def decode(
        self,
        streams: Mapping[str, Array],
        tokens: Tokens,
        level: str,
        *,
        dtype: str,
        first: int,
        position: int | None = None,
    ) -> dict[str, Tensor]:
        """A block's arrays, `[layers, heads, tokens, dim]` each, on the device; arguments as `coder.decode`.

        Raises InvalidObject, UnsupportedInput.
        """
        profile = self._profile
        place = place_of(profile, dtype, first, tokens.size)
        target = first if position is None else position
        missing = set(stream_names(profile, level, place, tokens.size)) - streams.keys()
        if missing:
            raise InvalidObject(f"the block lacks streams {sorted(missing)[:5]}")
        out = self._room(tokens.size, _DTYPES[dtype])
        for name in out:
            if name.startswith("k"):
                rotation_of(profile, name).check_move(first, tokens.size, target)
        if place.sinks:
            for name, array in sinks_of(profile, streams["sinks"], place, target).items():
                values = array.view(np.int16) if dtype == "bfloat16" else array
                kept = torch.from_numpy(values.copy()).to(self._device)
                out[name][:, :, : place.sinks] = kept.view(torch.bfloat16) if dtype == "bfloat16" else kept
        if place.sinks < tokens.size:
            for index, part in enumerate(profile.parts):
                rows = [streams[f"{each}.{index}"] for each in LEVELS[: depth(level) + 1]]
                numbers = self._numbers(index, part, rows, tokens[place.sinks :], level)
                self._write(part, numbers, out, place.sinks, target + place.sinks)
        return out

    def _room(self, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.empty((layers, heads, count, dim), dtype=dtype, device=self._device)
            for name, (layers, heads, dim) in self._profile.array_shapes().items()
        }

    def _numbers(self, index: int, part: Part, rows: list[Array], tokens: Tokens, level: str) -> Tensor:
        """What a part's streams stand for, `[tokens, width]`, keys free of positions."""
        coded = numbers_of(self._profile, part, rows, tokens.size)
        held = self._parts[index]
        values = torch.from_numpy(coded.numbers).to(self._device).to(torch.float32)
        values *= torch.from_numpy(token_steps(self._profile, coded.steps, level)).to(self._device)
        known = predicted(self._profile, part, tokens)
        if known is not None:
            values[: known.shape[0]] += torch.from_numpy(known).to(self._device)
        return values.T @ held.basis.to(torch.float32) * held.inverse + held.mean

    def _write(
        self, part: Part, numbers: Tensor, out: Mapping[str, Tensor], sinks: int, position: int
    ) -> None:
        at = 0
        for segment in part.segments:
            array = out[segment.array][segment.start : segment.stop, :, sinks:]
            layers, heads, tokens, dim = array.shape
            size = layers * heads * dim
            rows = numbers[:, at : at + size].reshape(tokens, layers, heads, dim).permute(1, 2, 0, 3)
            if segment.array.startswith("k"):
                rows = self._turned(rows.clone(), segment, position)
            limit = torch.finfo(array.dtype).max
            array.copy_(rows.clamp(-limit, limit))
            at += size

    def _turned(self, rows: Tensor, segment: Segment, position: int) -> Tensor:
        rotation = rotation_of(self._profile, segment.array)
        for row in range(segment.stop - segment.start):
            turn = rotation.turn(segment.start + row, position, rows.shape[2], inverse=False)
            if turn is None:
                continue
            cosine, sine = (torch.from_numpy(angles).to(self._device) for angles in turn[:2])
            pairs = cosine.shape[1]
            left = slice(0, 2 * pairs, 2) if turn[2] else slice(0, pairs)
            right = slice(1, 2 * pairs, 2) if turn[2] else slice(pairs, 2 * pairs)
            a, b = rows[row, ..., left].clone(), rows[row, ..., right].clone()
            rows[row, ..., left] = a * cosine - b * sine
            rows[row, ..., right] = b * cosine + a * sine
        return rows
