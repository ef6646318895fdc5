"""The self-test: K and V of the first layer, computed here from the file's weights, beside llama.cpp's own.

The input of the first layer is the embedding alone, so its K and V are a norm, a product and a rotation away.
A wrong order of K's pairs, another RoPE or shifted positions make K differ by more than its own size (1.39 of
it was measured for the pairs), quantised arithmetic by a few hundredths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retain.block import array_shapes, make_header
from retain.codecs.base import container
from retain.codecs.ladder.rope import Rotation
from retain.errors import InvalidObject, UnsupportedModel
from retain.gguf import GgufFile, GgufTensor
from retain.identity import as_tokens
from retain.model import LayerSpec, RopeSpec

from .host import Host

TOKENS = 32
MOST = 0.15
"""The largest distance that is taken for arithmetic, relative to the size of the numbers."""

Values = npt.NDArray[np.float64]


def check(host: Host) -> None:
    """Raise UnsupportedModel unless llama.cpp's K and V have the form that blocks are kept in, and a state
    that is put back continues as the one it was taken from."""
    tokens = as_tokens((np.arange(TOKENS, dtype=np.int64) * 97 + 5) % host.model.vocabulary)
    header = make_header(
        host.spec, space=bytes(32), parent=bytes(32), tokens=tokens[:-1], first=0, producer="self-test"
    )
    arrays = {
        name: np.empty(shape, container(host.spec.dtype)) for name, shape in array_shapes(header).items()
    }
    with host.sequence(lambda: False) as sequence:
        at = 0
        while at < TOKENS - 1:
            end = min(TOKENS - 1, at + host.step)
            host.run(sequence, tokens[at:end], at)
            host.capture(sequence, at, end, 0, arrays)
            at = end
        ahead = host.run(sequence, tokens[-1:], TOKENS - 1)[0]
    place = host.layout.places[0]
    k, v = first_layer(host.gguf, host.spec.layers[0].rope, tokens[:-1], host.spec.layers[0].heads)
    for name, mine, theirs in (("K", k, arrays[place.k][place.row]), ("V", v, arrays[place.v][place.row])):
        far = distance(mine, theirs.astype(np.float64))
        if not far <= MOST:
            raise UnsupportedModel(
                f"{name} of layer 0 in llama.cpp is not what {host.gguf.architecture} models have by the "
                f"table (distance {far:.2f}); KV of this model would be wrong in other engines"
            )
    _check_restore(host, tokens, arrays, ahead)


def first_layer(
    gguf: GgufFile, rope: RopeSpec | None, tokens: npt.NDArray[Any], heads: int
) -> tuple[Values, Values]:
    """K and V of layer 0 for tokens at positions 0 onwards, `[heads, tokens, dim]`, half-split."""
    config, tensors = gguf.config(), gguf.tensors()
    x = _rows(tensors["model.embed_tokens.weight"], tokens)
    offset = 1.0 if config["model_type"].startswith("gemma") else 0.0
    if offset:
        x = x * np.sqrt(config["hidden_size"])
    eps = float(config["rms_norm_eps"])
    x = _norm(x, _all(tensors, "model.layers.0.input_layernorm.weight") + offset, eps)
    k, v = (
        _heads(x @ _all(tensors, f"model.layers.0.self_attn.{part}_proj.weight").T, heads)
        + _bias(tensors, f"model.layers.0.self_attn.{part}_proj.bias", heads)
        for part in ("k", "v")
    )
    if "model.layers.0.self_attn.k_norm.weight" in tensors:
        k = _norm(k, _all(tensors, "model.layers.0.self_attn.k_norm.weight") + offset, eps)
    turned = Rotation([LayerSpec("full", heads, k.shape[-1], v.shape[-1], rope=rope)])
    return turned.apply(k[None].astype(np.float32), 0)[0].astype(np.float64), v


def distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """How far b is from a, relative to a."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))


def _check_restore(host: Host, tokens: Any, arrays: Mapping[str, Any], ahead: npt.NDArray[Any]) -> None:
    from retain.block import block_of

    header = make_header(
        host.spec, space=bytes(32), parent=bytes(32), tokens=tokens[:-1], first=0, producer="self-test"
    )
    block = block_of(header, tokens[:-1], arrays)
    with host.sequence(lambda: False) as sequence:
        try:
            host.restore(sequence, [block], [TOKENS - 1])
        except InvalidObject as error:
            raise UnsupportedModel(f"llama.cpp does not take back a state of its own: {error}") from error
        again = host.run(sequence, tokens[-1:], TOKENS - 1)[0]
    far = float(np.abs(again - ahead).max())
    if not far <= 1e-3 * max(1.0, float(np.abs(ahead).max())):
        raise UnsupportedModel(f"a state put back into llama.cpp continues differently (logits by {far:.2g})")


def _norm(x: Values, weight: Values, eps: float) -> Values:
    scaled: Values = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return scaled


def _heads(flat: Values, heads: int) -> Values:
    return flat.reshape(flat.shape[0], heads, -1).swapaxes(0, 1)


def _bias(tensors: Mapping[str, GgufTensor], name: str, heads: int) -> Any:
    return _heads(_all(tensors, name)[None], heads) if name in tensors else 0.0


def _all(tensors: Mapping[str, GgufTensor], name: str) -> Values:
    return tensors[name].read().astype(np.float64)


def _rows(tensor: GgufTensor, rows: npt.NDArray[Any]) -> Values:
    columns = np.arange(tensor.shape[-1], dtype=np.int64)
    found = tensor.sample(np.repeat(rows.astype(np.int64), columns.size), np.tile(columns, rows.size))
    return found.reshape(rows.size, columns.size)
