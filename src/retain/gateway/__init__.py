"""The OpenAI-compatible server: requests, tenants, queue, explanations of misses, metrics."""

from retain.errors import MissingDependency

try:
    from retain.gateway.local import EngineOptions
    from retain.gateway.server import build_app, run_server, serve
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("prometheus_client", "starlette", "uvicorn"):
        raise
    raise MissingDependency(
        f"the server needs the package {error.name}: pip install 'retain[serve,transformers]'"
    ) from error

__all__ = ["EngineOptions", "build_app", "run_server", "serve"]
