"""Codecs that Retain's are compared with: casts, integers a head, KIVI's four bits, LMCache's CacheGen."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retain.codecs.base import Array
from retain.engines import cachegen
from retain.errors import ConfigError

Layers = Sequence[tuple[Array, Array]]
"""K and V of every layer, `[heads, tokens, head_dim]`, float32."""

CACHEGEN_SECONDS = 600.0
GROUP = 32
RESIDUAL = 32


@dataclass(frozen=True)
class Coded:
    """What a codec makes of a context's KV: the numbers a reader gets, bits for them all, and seconds if
    measured."""

    layers: Layers
    bits: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


def float16(layers: Layers) -> Coded:
    """A cast: what ratios are measured against."""
    return _each(layers, lambda x: x.astype(np.float16).astype(np.float32), lambda x: 16 * x.size)


def bfloat16(layers: Layers) -> Coded:
    """A cast: the noise that engines in bfloat16 live with."""
    return _each(layers, to_bfloat16, lambda x: 16 * x.size)


def fp8(layers: Layers) -> Coded:
    """e4m3 without scales, as engines' fp8 KV by default."""
    return _each(layers, to_e4m3, lambda x: 8 * x.size)


def int8(layers: Layers) -> Coded:
    """Eight bits with one float16 scale a token and head."""

    def code(x: Array) -> Array:
        scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        scale = np.maximum(scale, 1e-12)
        coded: Array = np.clip(np.rint(x / scale), -127, 127) * scale
        return coded

    return _each(layers, code, lambda x: 8 * x.size + 16 * x.size // x.shape[-1])


def kivi(layers: Layers, bits: int = 4) -> Coded:
    """KIVI (Liu et al., ICML 2024): K in groups of 32 tokens a channel, V in groups of 32 channels a token,
    asymmetric, float16 minimum and scale; the last 32 tokens of K stay as they are."""

    def ranged(x: Array, axis: int) -> Array:
        low = x.min(axis, keepdims=True).astype(np.float16).astype(np.float32)
        step = ((x.max(axis, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
        step = np.maximum(step, 1e-8)
        coded: Array = np.clip(np.rint((x - low) / step), 0, 2**bits - 1) * step + low
        return coded

    total = 0.0
    out = []
    for k, v in layers:
        heads, tokens, size = k.shape
        grouped = max(0, tokens - RESIDUAL) // GROUP * GROUP
        parts = ranged(k[:, :grouped].reshape(heads, -1, GROUP, size), 2).reshape(heads, grouped, size)
        coded_k = np.concatenate([parts, k[:, grouped:].astype(np.float16).astype(np.float32)], 1)
        width = GROUP if v.shape[-1] % GROUP == 0 else v.shape[-1]
        coded_v = ranged(v.reshape(heads, tokens, -1, width), 3).reshape(v.shape)
        total += parts.size * (bits + 32 / GROUP) + 16 * (k.size - parts.size) + v.size * (bits + 32 / width)
        out.append((coded_k, coded_v))
    return Coded(out, total)


def lmcache_cachegen(layers: Layers, python: str, model: Path) -> Coded:
    """CacheGen by LMCache's own classes, in the venv of `python`; every byte that it writes is counted.

    `model` is the directory with the model's config, from which it takes the number of layers. Raises
    ConfigError when it does not run, or cannot code layers of differing shapes.
    """
    if len({(k.shape, v.shape) for k, v in layers}) > 1:
        raise ConfigError("CacheGen codes only models whose layers have all one shape")
    with tempfile.TemporaryDirectory(prefix="retain-bench-") as place:
        folder = Path(place)
        for index, name in enumerate("kv"):
            np.save(folder / f"{name}.npy", np.stack([pair[index] for pair in layers]).astype(np.float32))
        run = subprocess.run(
            [python, "-P", cachegen.__file__, str(folder), str(model)],
            capture_output=True, text=True, timeout=CACHEGEN_SECONDS, check=False,
        )  # fmt: skip
        if run.returncode:
            words = " / ".join(run.stderr.strip().splitlines()[-3:])
            raise ConfigError(f"CacheGen does not run with {python}: {words}")
        told = json.loads(run.stdout.strip().splitlines()[-1])
        k, v = (np.load(folder / f"{name}.out.npy", allow_pickle=False) for name in "kv")
        return Coded(list(zip(k, v, strict=True)), 8.0 * told["bytes"])


def to_bfloat16(x: Array) -> Array:
    """Rounded to bfloat16, as float32."""
    return from_bits(bfloat16_bits(x))


def bfloat16_bits(x: Array) -> Array:
    """Numbers rounded to bfloat16, to even, as their bit patterns in uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def from_bits(bits: Array) -> Array:
    """bfloat16 bit patterns as float32."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def to_e4m3(x: Array) -> Array:
    """Rounded to e4m3 with saturation at 448: three bits of mantissa, subnormals below 2**-6."""
    magnitude = np.minimum(np.abs(x), 448.0)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-6)))
    step = np.exp2(exponent - 3)
    rounded: Array = np.copysign(np.rint(magnitude / step) * step, x).astype(np.float32)
    return rounded


def _each(layers: Layers, code: Callable[[Array], Array], bits: Callable[[Array], float]) -> Coded:
    coded = [(code(k), code(v)) for k, v in layers]
    return Coded(coded, sum(bits(k) + bits(v) for k, v in layers))
