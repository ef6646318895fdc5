"""CacheGen as LMCache ships it, a program of its own: KV from files, coded by LMCache's own classes.

Run by the Python of a venv that holds LMCache; Retain need not be installed there. Arguments: a folder with
`k.npy` and `v.npy` (`[layers, heads, tokens, head_dim]`, float32) and the directory of the model's config.
Writes `k.out.npy` and `v.out.npy`, and prints one JSON object: the bytes of everything coded, and seconds.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHUNK_TOKENS = 256


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    np: Any = importlib.import_module("numpy")
    torch: Any = importlib.import_module("torch")
    serde = "lmcache.storage_backend.serde"
    encoder: Any = importlib.import_module(f"{serde}.cachegen_encoder")
    decoder: Any = importlib.import_module(f"{serde}.cachegen_decoder")
    arrays = [torch.from_numpy(np.load(folder / f"{name}.npy", allow_pickle=False)) for name in "kv"]
    blob = torch.stack(arrays, 1).permute(0, 1, 3, 2, 4).contiguous()  # [layers, 2, tokens, heads, head_dim]
    config, metadata = SimpleNamespace(chunk_size=CHUNK_TOKENS), SimpleNamespace(model_name=model)
    coder = encoder.CacheGenSerializer(config, metadata)
    reader = decoder.CacheGenDeserializer(config, metadata, torch.float32)
    size, encoding, decoding = 0, 0.0, 0.0
    decoded = torch.empty_like(blob)
    for first in range(0, blob.shape[2], CHUNK_TOKENS):
        started = time.perf_counter()
        data = coder.to_bytes(blob[:, :, first : first + CHUNK_TOKENS])
        between = time.perf_counter()
        decoded[:, :, first : first + CHUNK_TOKENS] = reader.from_bytes(data)
        decoding += time.perf_counter() - between
        encoding += between - started
        size += len(data)
    for name, array in zip("kv", decoded.permute(1, 0, 3, 2, 4).contiguous(), strict=True):
        np.save(folder / f"{name}.out.npy", array.numpy())
    print(json.dumps({"bytes": size, "encode_seconds": encoding, "decode_seconds": decoding}))


if __name__ == "__main__":
    main()
