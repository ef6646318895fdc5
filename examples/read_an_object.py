"""Open an object that Retain keeps with plain safetensors and hashlib, and compute its key again.

Everything needed is in the file itself and in docs/format.md; this program uses no code of Retain.

    python examples/read_an_object.py ~/.cache/retain/kv/.../OBJECT
"""

import hashlib
import json
import struct
import sys

import numpy as np
from safetensors import safe_open

path = sys.argv[1]
with safe_open(path, framework="numpy") as file:
    header = file.metadata()
    tokens = file.get_tensor("tokens")
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict


def field(value):
    """One field of a digest: a type byte, its length in 64 bits, its bytes (docs/format.md)."""
    if value is None:
        return b"N" + struct.pack("<Q", 0)
    if isinstance(value, int):
        return b"I" + struct.pack("<Qq", 8, value)
    if isinstance(value, str):
        return b"S" + struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"B" + struct.pack("<Q", len(value)) + value
    return b"L" + struct.pack("<Q", len(value)) + b"".join(map(field, value))


media = [
    (position, length, bytes.fromhex(digest)) for position, length, digest in json.loads(header["media"])
]
parts = (
    "retain/key",
    bytes.fromhex(header["parent"]),
    tokens.astype(np.dtype("<u4")).tobytes(),
    media or None,
)
key = hashlib.sha256(b"".join(map(field, parts))).hexdigest()

print(f"model   {header['model']}, {header['dtype']}, codec {header['codec']}")
print(f"tokens  {header['count']} from position {header['first']}: {tokens[:8].tolist()} ...")
for name, shape in shapes.items():
    print(f"tensor  {name} {shape}")
print(f"key     {header['key']}")
print(f"again   {key}: {'the same' if key == header['key'] else 'ANOTHER'}")
sys.exit(key != header["key"])
