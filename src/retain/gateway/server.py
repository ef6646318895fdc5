"""Starting and stopping the server: the model's load, the port, signals, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from retain import DAEMON
from retain.address import TierAddress
from retain.cache import BlockCache
from retain.errors import ConfigError
from retain.fidelity import checked
from retain.gateway.app import application
from retain.gateway.engine import Engine
from retain.gateway.local import EngineOptions, open_engine
from retain.gateway.service import Service
from retain.gateway.tenants import Tenants, check_bind, read_api_keys
from retain.models import PACKAGED, find

log = logging.getLogger("retain.gateway")

FLUSH_SECONDS = 60.0
CANCEL_SECONDS = 10.0
"""How long a cancelled generation may take to notice: one chunk of a prefill on a slow machine."""

Opened = tuple[Engine, BlockCache]


def run_server(
    model: str,
    tiers: Sequence[str | TierAddress],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    api_keys: Sequence[str] = (),
    api_key_file: Path | None = None,
    served_name: str | None = None,
    policy: str = "reuse-leaf",
    daemon: bool = False,
    audit: float = 0.0,
    fidelity: str = "kin",
    engine: str = "transformers",
    options: EngineOptions = EngineOptions(),  # noqa: B008 - it is frozen
    max_queue: int = 64,
    grace: float = 30.0,
    allow_open: bool = False,
    log_level: str = "info",
) -> int:
    """Load `model` (a directory, a GGUF file, or `smollm2`), serve it until SIGTERM or SIGINT, return the
    exit code.

    `engine` is transformers or llamacpp, `options` how it runs the model. With `daemon` the node's daemon
    keeps the cache, started if need be; else this process does. `api_keys` are texts NAME=KEY, each a tenant;
    the name `admin` is the operator's. `served_name` is the model's name in the API, by default that of its
    directory or file. `fidelity` is the lowest accepted of kept KV by requests that name none themselves.
    `grace` is how many seconds running requests have to finish when the server is stopped. Raises ConfigError
    and the errors of loading the model.
    """
    keys = read_api_keys(api_keys, api_key_file)
    check_bind(host, keys, allow_open)
    source = find(model)
    write_log(log_level)

    def open_model() -> Opened:
        return open_engine(
            engine,
            source,
            (DAEMON, *tiers) if daemon else tiers,
            policy=policy,
            audit=audit,
            fidelity=checked(fidelity),
            options=options,
        )

    name = served_name or (model.lower() if model.lower() in PACKAGED else source.name)
    service = Service(name, max_queue)
    return serve(service, open_model, keys, host=host, port=port, grace=grace)


def build_app(
    engine: Engine,
    cache: BlockCache,
    name: str,
    *,
    api_keys: Mapping[str, str] | None = None,
    max_queue: int = 64,
) -> Starlette:
    """The application over a loaded engine, for any ASGI server. The caller closes engine and cache."""
    service = Service(name, max_queue)
    service.ready(engine, cache)
    return application(service, Tenants(api_keys))


def serve(
    service: Service,
    open_model: Callable[[], Opened],
    api_keys: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: float = 30.0,
) -> int:
    """Serve until SIGTERM or SIGINT: open the port, then the model; at the end flush the cache."""
    listener = listen(host, port)
    loading = _Loading(service, open_model)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading.start(server.stop_soon)
        yield

    app = application(service, Tenants(api_keys), lifespan)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace + CANCEL_SECONDS) + 1,
    )
    server = _Server(config, service, grace)
    where = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d, loading %s", where, listener.getsockname()[1], service.name)
    # uvicorn raises the signal again when it has ended well; it must not end the process before the cache is
    # flushed.
    quiet = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
        clean = loading.close(service)
        for number, handler in quiet.items():
            signal.signal(number, handler)
    if loading.error is not None:
        raise loading.error
    log.info("stopped%s", "" if clean else "; not everything was written")
    return 0 if clean else 1


class _Loading:
    """The model and the cache, opened beside the event loop and closed at the end."""

    def __init__(self, service: Service, open_model: Callable[[], Opened]) -> None:
        self._service = service
        self._open = open_model
        self._opened: Opened | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.error: Exception | None = None

    def start(self, give_up: Callable[[], None]) -> None:
        """Load in a thread of its own; `give_up` is called when that fails."""

        def load() -> None:
            try:
                opened = self._open()
            except Exception as error:
                self.error = error
                self._service.state = "failed"
                log.error("loading %s failed: %s", self._service.name, error)
                give_up()
                return
            with self._lock:
                self._opened = opened
                if self._closed:  # the server was stopped meanwhile
                    opened[1].close()
                    return
            self._service.ready(*opened)
            log.info(
                "%s is ready; it takes %d tokens of prompt and answer", self._service.name, opened[0].context
            )

        # A daemon: a server that is stopped while it loads does not wait for the load.
        threading.Thread(target=load, name="retain-load", daemon=True).start()

    def close(self, service: Service) -> bool:
        """End what runs, write what is to be written; whether all of it was."""
        service.stop()
        service.line.cancel_all()
        idle = service.line.wait_idle(CANCEL_SECONDS)
        with self._lock:
            self._closed = True
            opened = self._opened
        if opened is None:
            return True
        engine, cache = opened
        engine.close()
        flushed = cache.flush(FLUSH_SECONDS)
        cache.close()
        return idle and flushed


class _Server(uvicorn.Server):
    """uvicorn, which when told to stop lets requests finish for `grace` seconds, then cancels them."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.should_exit
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop, 0.0 if again else self._grace)

    def stop_soon(self) -> None:
        """Stop, from any thread."""
        self.should_exit = True

    def _stop(self, grace: float) -> None:
        self._service.stop()
        line = self._service.line
        if line.waiting or line.running:
            log.info("stopping: %d running, %d waiting, %.0f s to finish", line.running, line.waiting, grace)
        asyncio.get_running_loop().call_later(grace, line.cancel_all)


def write_log(level: str) -> None:
    """Send the log to standard error, one readable line an event."""
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ConfigError(f"{level!r} is not a log level; known are debug, info, warning, error")
    logging.basicConfig(
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True
    )
    logging.getLogger("retain").setLevel(number)
    for noisy in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another --port"
        ) from error
    listener.setblocking(False)
    return listener


def ignore(number: int, frame: FrameType | None) -> None:
    """The server has seen the signal already."""
