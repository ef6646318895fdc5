"""The daemon's read-only HTTP port, on loopback, when asked for: /metrics in Prometheus's text format and
/health.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .messages import State
from .server import Server


def serve_http(server: Server, port: int) -> ThreadingHTTPServer:
    """Serve on 127.0.0.1:`port` (0: any free one) from a thread of its own. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer("".join(metrics(server.desk.state())), "text/plain; version=0.0.4")
            elif self.path == "/health":
                state = server.desk.state()
                health = {
                    "status": "ok",
                    "pid": state.pid,
                    "uptime_seconds": state.uptime,
                    "sessions": state.sessions,
                    "tiers": state.health,
                }
                self._answer(json.dumps(health), "application/json")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not news."""

    listening = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, name="retain-http", daemon=True).start()
    return listening


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
    yield "# TYPE retain_tier_up gauge\n"
    for name, health in sorted(state.health.items()):
        yield f'retain_tier_up{{tier="{name}"}} {int(health == "up")}\n'
    yield f"# TYPE retain_pending_writes gauge\nretain_pending_writes {state.pending}\n"
    yield f"# TYPE retain_uptime_seconds gauge\nretain_uptime_seconds {state.uptime:.3f}\n"
    yield f"# TYPE retain_sessions gauge\nretain_sessions {state.sessions}\n"
