"""A toy server in a process of its own, to be killed: `toy_process.py PORT NAME PACE`.

It answers NAME over and over, a byte each PACE seconds.
"""

from __future__ import annotations

import sys

import uvicorn

from retain.cache import open_cache
from retain.gateway.server import build_app
from tests.gateway.toy import ToyEngine


def main() -> None:
    port, name, pace = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    engine = ToyEngine(name * 50, pace=pace)
    app = build_app(engine, open_cache("memory:16MiB"), "toy")
    uvicorn.run(app, port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
