"""Taking rotary positions out of keys and putting them in, as transformers computes them.

Sources: transformers' `modeling_rope_utils` (linear, dynamic, yarn, longrope, llama3); YaRN: arXiv
2309.00071; LongRoPE: arXiv 2402.13753. Frequencies and angles are rounded to float32 as engines round them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array
from retain.errors import UnsupportedInput, UnsupportedModel
from retain.model import LayerSpec, RopeSpec

Floats = npt.NDArray[np.float32]
Turn = tuple[Floats, Floats, bool]


class Rotation:
    """The rotary positions of an array's rows, `[rows, heads, tokens, dim]`, one layer each.

    Raises UnsupportedModel for a layer whose keys hold positions in a way that is not known.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        for layer in layers:
            if layer.kind not in ("full", "sliding"):
                raise UnsupportedModel(f"keys of {layer.kind} layers cannot be freed of their positions")
            if layer.rope is not None:
                _check(layer.rope, layer.k_dim)
        self._ropes = tuple(layer.rope for layer in layers)

    def remove(self, keys: Floats, first: int) -> Floats:
        """The keys of tokens at positions `first` onwards, as they were before rotation."""
        return self._turned(keys, first, inverse=True)

    def apply(self, keys: Floats, first: int) -> Floats:
        """The inverse of `remove`, at any position."""
        return self._turned(keys, first, inverse=False)

    def check_move(self, first: int, count: int, position: int) -> None:
        """Raise UnsupportedInput where keys from `first` cannot be put at `position`: where a scaling rule
        has other frequencies there."""
        for rope in self._ropes:
            if rope is not None and position != first:
                limit = _limit(rope)
                if limit is not None and max(first, position) + count > limit:
                    raise UnsupportedInput(
                        f"keys with {rope.scaling} RoPE cannot be moved from position {first} to {position}: "
                        f"frequencies change at {limit}"
                    )

    def turn(self, row: int, first: int, count: int, *, inverse: bool) -> Turn | None:
        """Cosine and sine of a row's angles, `[count, rotary_dim / 2]`, and whether neighbouring dimensions
        pair rather than those half a head apart; None where keys are not turned."""
        rope = self._ropes[row]
        return None if rope is None else (*_tables(rope, first, count, inverse), _interleaved(rope))

    def _turned(self, keys: Floats, first: int, *, inverse: bool) -> Floats:
        turned = np.array(keys, np.float32)
        for row, rope in enumerate(self._ropes):
            if rope is not None:
                cosine, sine = _tables(rope, first, keys.shape[2], inverse)
                left, right = _halves(rope)
                a, b = keys[row][..., left], keys[row][..., right]
                turned[row][..., left] = a * cosine - b * sine
                turned[row][..., right] = b * cosine + a * sine
        return turned


def _halves(rope: RopeSpec) -> tuple[slice, slice]:
    """Which of a head's dimensions form pairs: first ones, second ones."""
    if _interleaved(rope):
        return slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    half = rope.rotary_dim // 2
    return slice(0, half), slice(half, rope.rotary_dim)


def _interleaved(rope: RopeSpec) -> bool:
    return dict(rope.parameters).get("pairs") == "interleaved"


def _check(rope: RopeSpec, dim: int) -> None:
    parameters = dict(rope.parameters)
    if rope.scaling not in _RULES:
        raise UnsupportedModel(f"the RoPE rule {rope.scaling!r} is not known; known are {', '.join(_RULES)}")
    if rope.rotary_dim < 2 or rope.rotary_dim % 2 or rope.rotary_dim > dim:
        raise UnsupportedModel(f"RoPE cannot turn {rope.rotary_dim} of {dim} dimensions")
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise UnsupportedModel(f"RoPE cannot have the base {rope.theta}")
    if parameters.get("pairs", "interleaved") != "interleaved" or "kv_lora_rank" in parameters:
        raise UnsupportedModel(
            f"RoPE with {parameters} is not known to turn keys in a way that can be undone"
        )
    try:
        with np.errstate(all="ignore"):
            frequencies = _RULES[rope.scaling](rope, parameters, 0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UnsupportedModel(
            f"{rope.scaling} RoPE with {parameters} cannot be computed: {error}"
        ) from error
    factor = attention_factor(rope)
    if not np.isfinite(frequencies).all() or not (math.isfinite(factor) and factor > 0):
        raise UnsupportedModel(f"{rope.scaling} RoPE with {parameters} gives no finite frequencies")


def attention_factor(rope: RopeSpec) -> float:
    """What a scaling rule multiplies cosine and sine by."""
    given: Mapping[str, Any] = dict(rope.parameters)
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    factor = float(given.get("factor", 1.0))
    if rope.scaling == "longrope":
        original = float(given["original_max_position_embeddings"])
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    wanted, whole = given.get("mscale"), given.get("mscale_all_dim")
    if wanted and whole:
        return _yarn_scale(factor, float(wanted)) / _yarn_scale(factor, float(whole))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@lru_cache(maxsize=64)
def _tables(rope: RopeSpec, first: int, count: int, inverse_turn: bool) -> tuple[Floats, Floats]:
    inverse = _RULES[rope.scaling](rope, dict(rope.parameters), first + count).astype(np.float32)
    angles = np.arange(first, first + count, dtype=np.float32)[:, None] * inverse
    wide = angles.astype(np.float64)
    scale = attention_factor(rope)
    cosine, sine = (
        (np.cos(wide) / scale, -np.sin(wide) / scale)
        if inverse_turn
        else (np.cos(wide) * scale, np.sin(wide) * scale)
    )
    return cosine.astype(np.float32), sine.astype(np.float32)


_Rule = Callable[[RopeSpec, Mapping[str, Any], int], Array]


def _plain(rope: RopeSpec, given: Mapping[str, Any], stop: int) -> Array:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.asarray(1.0 / np.power(np.float32(rope.theta), exponents), np.float32)


def _linear(rope: RopeSpec, given: Mapping[str, Any], stop: int) -> Array:
    return _plain(rope, given, stop) / np.float32(given["factor"])


def _llama3(rope: RopeSpec, given: Mapping[str, Any], stop: int) -> Array:
    inverse = _plain(rope, given, stop)
    original = float(given["original_max_position_embeddings"])
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    factor = np.float32(given["factor"])
    waves = 2 * math.pi / inverse
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(waves > original / low, inverse / factor, inverse)
    return np.where((waves <= original / low) & (waves >= original / high), blended, scaled)


def _yarn(rope: RopeSpec, given: Mapping[str, Any], stop: int) -> Array:
    inverse = _plain(rope, given, stop)
    size = rope.rotary_dim
    original = float(given["original_max_position_embeddings"])

    def at(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = at(float(given.get("beta_fast") or 32)), at(float(given.get("beta_slow") or 1))
    if given.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return np.asarray(inverse / np.float32(given["factor"]) * ramp + inverse * (1 - ramp))


def _longrope(rope: RopeSpec, given: Mapping[str, Any], stop: int) -> Array:
    long = stop > float(given["original_max_position_embeddings"])
    factors = np.asarray(given["long_factor" if long else "short_factor"], np.float32)
    if factors.shape != (rope.rotary_dim // 2,):
        raise ValueError(f"{factors.size} factors for {rope.rotary_dim} dimensions")
    return _plain(rope, given, stop) / factors


def _limit(rope: RopeSpec) -> float | None:
    """The position from which a rule's frequencies are others, None where they never change."""
    given: Mapping[str, Any] = dict(rope.parameters)
    if rope.scaling == "longrope":
        return float(given["original_max_position_embeddings"])
    if rope.scaling == "dynamic":
        return float(given["max_position_embeddings"])
    return None


_RULES: Mapping[str, _Rule] = {
    "none": _plain,
    "linear": _linear,
    # Within the original context. Beyond it frequencies depend on how long the sequence was, which a block
    # does not say: taking out and putting in the same angles is exact all the same.
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
