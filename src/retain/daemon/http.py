"""The daemon's HTTP port, when asked for: /metrics in Prometheus's text format and /health; where a token is
configured, also its blocks, as an origin and an upload target for other hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from .holdings import CacheHoldings
from .messages import State
from .origin import OriginHandler, serve
from .server import Server

MOST_TENANTS = 1000
"""Tenants of a tier that metrics tell of, by name: labels that grow without bound would fill Prometheus."""


def serve_http(
    server: Server,
    port: int,
    host: str = "127.0.0.1",
    *,
    token: str | None = None,
    cert: str | None = None,
    key: str | None = None,
) -> ThreadingHTTPServer:
    """Serve on `host`:`port` (0: any free one) from a thread of its own, with TLS where there is a
    certificate. Raises OSError, ConfigError.
    """
    secret = token

    class Handler(OriginHandler):
        holdings = CacheHoldings(server.cache)
        token = secret

        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            if self.path == "/metrics":
                if self.token is None or self._admitted():
                    self._text("".join(metrics(server.desk.state())), "text/plain; version=0.0.4")
            elif self.path == "/health":
                state = server.desk.state()
                health = {
                    "status": "ok",
                    "pid": state.pid,
                    "uptime_seconds": state.uptime,
                    "sessions": state.sessions,
                    "tiers": state.health,
                }
                self._text(json.dumps(health), "application/json")
            else:
                super().do_GET()

        def _admitted(self, *, write: bool = False) -> bool:
            if self.token is None:  # whoever is on this machine could read everybody's conversations
                self._refuse(404, close=True)
                return False
            return super()._admitted(write=write)

    return serve(Handler, host, port, cert=cert, key=key)


def metrics(state: State) -> Iterator[str]:
    """The state as Prometheus text: counters `retain_*_total`, gauges by tier."""
    for name, value in sorted(state.counters.items()):
        yield f"# TYPE retain_{name}_total counter\nretain_{name}_total {value}\n"
    yield "# TYPE retain_failures_total counter\n"
    for reason, value in sorted(state.failures.items()):
        yield f"retain_failures_total{{reason={json.dumps(reason)}}} {value}\n"
    gauges = ("objects", "bytes", "capacity_bytes", "leased", "pinned")
    for index, gauge in enumerate(gauges):
        yield f"# TYPE retain_tier_{gauge} gauge\n"
        for name, _, *values in state.tiers:
            yield f'retain_tier_{gauge}{{tier="{name}"}} {values[index]}\n'
    for gauge in ("pinned_bytes", "unreachable_objects", "unreachable_bytes"):
        yield f"# TYPE retain_tier_{gauge} gauge\n"
        for name, room in state.rooms.items():
            yield f'retain_tier_{gauge}{{tier="{name}"}} {getattr(room, gauge)}\n'
    yield "# TYPE retain_tenant_bytes gauge\n"
    for name, room in state.rooms.items():
        for tenant, (_, size) in sorted(room.tenants.items())[:MOST_TENANTS]:
            yield f'retain_tenant_bytes{{tier="{name}",tenant={json.dumps(tenant)}}} {size}\n'
    yield "# TYPE retain_tier_up gauge\n"
    for name, health in sorted(state.health.items()):
        yield f'retain_tier_up{{tier="{name}"}} {int(health == "up")}\n'
    yield f"# TYPE retain_pending_writes gauge\nretain_pending_writes {state.pending}\n"
    yield f"# TYPE retain_uptime_seconds gauge\nretain_uptime_seconds {state.uptime:.3f}\n"
    yield f"# TYPE retain_sessions gauge\nretain_sessions {state.sessions}\n"
