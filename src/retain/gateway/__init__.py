"""The OpenAI-compatible server: requests, tenants, queue, explanations of misses, metrics."""

from retain.gateway.server import build_app, run_server, serve

__all__ = ["build_app", "run_server", "serve"]
