"""The daemon as a program: `python -m retain.daemon`, started on demand, by `retain daemon` or systemd."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from retain.address import TierAddress, parse_tier
from retain.cache import open_cache
from retain.errors import RetainError, StoreUnavailable
from retain.stores.opening import secret

from .http import serve_http
from .server import Server
from .start import listen, reach, runtime_folder, socket_path

log = logging.getLogger("retain.daemon")

TAKE_OVER_SECONDS = 20.0
"""How long a new daemon waits for one that is about to end."""


def run(
    tiers: Sequence[str | TierAddress],
    policy: str = "reuse-leaf",
    *,
    socket: Path | None = None,
    idle: float | None = None,
    http: int | None = None,
    http_host: str = "127.0.0.1",
    http_token: str | None = None,
    http_cert: str | None = None,
    http_key: str | None = None,
) -> int:
    """Serve these tiers until stopped; 0, also where another daemon serves them already.

    `http` is a port for metrics, and with `http_token` for the blocks themselves, on `http_host`, with TLS
    where there is a certificate.
    """
    addresses = [parse_tier(each) if isinstance(each, str) else each for each in tiers]
    runtime_folder()
    path = socket or socket_path(addresses, policy)
    deadline = time.monotonic() + TAKE_OVER_SECONDS
    while (listening := listen(path)) is None:
        with suppress(OSError), reach(path):
            log.info("another daemon serves %s", path)
            return 0
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"another daemon holds {path} but does not answer")
        time.sleep(0.05)
    server = Server(open_cache(*addresses, policy=policy), listening[0], idle_seconds=idle)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if http is not None:
        serve_http(server, http, http_host, token=http_token, cert=http_cert, key=http_key)
    server.serve()
    path.unlink(missing_ok=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m retain.daemon", description=__doc__)
    parser.add_argument("--tier", action="append", default=[], help="a tier address; repeat for tiers below")
    parser.add_argument("--policy", default="reuse-leaf")
    parser.add_argument("--socket", type=Path, help="where to listen; else in the runtime folder")
    parser.add_argument("--idle", type=float, help="end after this many seconds without clients")
    parser.add_argument("--http", type=int, help="a loopback port for /metrics and /health")
    parser.add_argument("--http-host", default="127.0.0.1", help="the address to serve on")
    parser.add_argument("--http-token", help="serve blocks to who has this: file:PATH or env:NAME")
    parser.add_argument("--http-cert", help="a certificate: serve with TLS")
    parser.add_argument("--http-key", help="the certificate's key")
    parser.add_argument("--detach", action="store_true", help="go on as a process that is nobody's child")
    given = parser.parse_args(arguments)
    if given.detach and os.fork():
        os._exit(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return run(
            given.tier,
            given.policy,
            socket=given.socket,
            idle=given.idle,
            http=given.http,
            http_host=given.http_host,
            http_token=None if given.http_token is None else secret(given.http_token),
            http_cert=given.http_cert,
            http_key=given.http_key,
        )
    except RetainError as error:
        print(f"retain: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
