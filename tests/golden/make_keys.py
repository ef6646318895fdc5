"""Writes keys.json, the golden keys, with nothing but hashlib and struct: an independent reading of
docs/format.md.
"""

import hashlib
import json
import struct
import sys


def field(value):
    if value is None:
        return b"N" + struct.pack("<Q", 0)
    if isinstance(value, int):
        return b"I" + struct.pack("<Qq", 8, value)
    if isinstance(value, str):
        return b"S" + struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"B" + struct.pack("<Q", len(value)) + value
    return b"L" + struct.pack("<Q", len(value)) + b"".join(field(item) for item in value)


def digest(*fields):
    return hashlib.sha256(b"".join(field(value) for value in fields)).digest()


def keys_of(kin, adapter, salt, tokens, block_tokens, media):
    space = digest("retain/1", kin, adapter, salt)
    parent = digest("retain/root", space)
    keys, contents = [], []
    for start in range(0, len(tokens), block_tokens):
        part = tokens[start : start + block_tokens]
        data = struct.pack(f"<{len(part)}I", *part)
        touched = [m for m in sorted(media) if m[0] < start + len(part) and m[0] + m[1] > start]
        spans = [[m[0] - start, m[1], m[2]] for m in touched] or None
        parent = digest("retain/key", parent, data, spans)
        keys.append(parent.hex())
        contents.append(digest("retain/content", data, spans).hex())
    return {"space": space.hex(), "keys": keys, "contents": contents}


def cases():
    kin, adapter, image = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
    tenant = digest("retain/salt", "alice", None)
    yield {
        "kin": kin,
        "adapter": None,
        "salt": None,
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [],
    }
    yield {
        "kin": kin,
        "adapter": adapter,
        "salt": None,
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [],
    }
    yield {
        "kin": kin,
        "adapter": None,
        "salt": tenant,
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [],
    }
    yield {
        "kin": kin,
        "adapter": None,
        "salt": b"",
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [],
    }
    yield {
        "kin": kin,
        "adapter": None,
        "salt": None,
        "tokens": [0, 1, 2**31, 2**32 - 1] * 160,
        "block_tokens": 256,
        "media": [],
    }
    yield {
        "kin": kin,
        "adapter": None,
        "salt": None,
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [(10, 12, image)],
    }
    yield {
        "kin": kin,
        "adapter": None,
        "salt": None,
        "tokens": list(range(40)),
        "block_tokens": 16,
        "media": [(34, 2, image)],
    }


def main():
    rows = []
    for case in cases():
        row = keys_of(**case)
        row["given"] = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in case.items()
            if name != "media"
        }
        row["given"]["media"] = [[m[0], m[1], m[2].hex()] for m in case["media"]]
        rows.append(row)
    json.dump(rows, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
