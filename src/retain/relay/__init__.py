"""The relay: sends each prompt to one server to be prefilled, and to another to be answered."""

from retain.errors import MissingDependency

try:
    from retain.relay.server import build_app, run_relay
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("httpx", "prometheus_client", "starlette", "uvicorn"):
        raise
    raise MissingDependency(
        f"the relay needs the package {error.name}: pip install 'retain[serve]'"
    ) from error

__all__ = ["build_app", "run_relay"]
