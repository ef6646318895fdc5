"""The OpenAI-compatible server in front of an engine: requests, tenants, queue, explanations of misses, metrics."""

from retain.gateway.server import build_app, run_server, serve

__all__ = ["build_app", "run_server", "serve"]
