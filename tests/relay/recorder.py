"""A server that writes down what it is asked and answers always the same."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Got:
    """One request: its path with the query, its headers by lower-case name, its body."""

    path: str
    headers: dict[str, str]
    body: bytes


class Recorder:
    """Answers `told` as JSON, or the bytes `raw` as an event stream, with `cut` broken off behind them."""

    def __init__(self, told: Any = None, raw: bytes | None = None, *, cut: bool = False) -> None:
        self.got: list[Got] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                recorder.got.append(Got(self.path, headers, body))
                self.send_response(200)
                data = json.dumps(told).encode() if raw is None else raw
                self.send_header("Content-Type", "application/json" if raw is None else "text/event-stream")
                self.send_header("Content-Length", str(len(data) + cut))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = cut

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
