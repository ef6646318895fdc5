"""RetainConnector: what vLLM calls. It hands each call to its side, and lets no exception out of a step.

At start it raises what a user has to know: a version that was not tested, a model or layout whose KV cannot
be kept. From then on a failure is a miss: counted, logged once, and answered by computing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from retain.engines import handover
from retain.errors import UnsupportedModel

from . import version
from .messages import Report, Step
from .metrics import PromMetrics, Stats
from .scheduler import Scheduler
from .settings import read
from .shared import join
from .worker import Worker

log = logging.getLogger("vllm.retain")

_SOURCES = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Answer with `default()` where a call raises: a fault of ours must not end the engine."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                log.exception("Retain failed in %s; vLLM goes on without it", call.__name__)
                connector: Any = args[0]
                connector.shared.cache.failure(
                    f"the connector failed in {call.__name__}", f"{type(error).__name__}: {error}"
                )
                fallback: R = default()
                return fallback

        return wrapper

    return decorate


def _nothing() -> None:
    return None


class RetainConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Loads kept prefixes into vLLM's pages, and keeps what it computes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        version.check(vllm.__version__)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read(transfer.kv_connector_extra_config)
        _check_parallel(vllm_config.parallel_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.info("kv_load_failure_policy is set to recompute: a failed load is answered by computing")
            transfer.kv_load_failure_policy = "recompute"
        self.shared = join(str(transfer.engine_id), settings, single=_single_process(vllm_config))
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = Scheduler(vllm_config, kv_cache_config, self.shared, settings)
            else:
                self._worker = self.shared.worker = Worker(
                    vllm_config, kv_cache_config, self.shared, settings
                )
        except BaseException:
            self.shared.leave()
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not kept is computed again

    @property
    def _planner(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("a scheduler's call reached a connector that is none")
        return self._scheduler

    @property
    def _mover(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("a worker's call reached a connector that is none")
        return self._worker

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._mover.register(kv_caches)

    @_guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads take place between steps, so none is under way while a request is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, once a step has computed all of their layers."""

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        self._mover.start_saves(self._step().saves)

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self._mover.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._mover.bad_blocks()

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> Report | None:
        return self._mover.report()

    # the scheduler's side

    @_guarded(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._planner.bind(gpu_block_pool)

    @_guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._planner.arrived()

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._planner.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        found: dict[CacheHitSource, int] = {}
        for kind, tokens in self._planner.sources(request, num_external_tokens).items():
            source = _SOURCES.get(kind, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + tokens
        return found

    @_guarded(Step)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._planner.plan(scheduler_output)

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._planner.reported(
            connector_output.finished_recving or (), report if isinstance(report, Report) else None
        )

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Freeing the blocks is not delayed: those that are still to be copied are held one by one.
        kept = self._planner.finished(request, block_ids)
        hands_over = kept and handover.asked(request.kv_transfer_params)
        return False, handover.promise(kept) if hands_over else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._planner.busy

    @_guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._planner.yields

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        events = self._planner.events
        if not events:
            return ()
        taken = list(events)
        events.clear()
        return taken

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._planner.reset()

    # both

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> Stats | None:
        return self._worker.counts.take() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded(_nothing)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self.shared.worker = None
        if self._worker is not None or self._scheduler is not None:
            self._worker = self._scheduler = None
            self.shared.leave()

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        return step if isinstance(step, Step) else Step()


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise UnsupportedModel(
                f"{name} above 1 spreads a prefix's tokens over ranks, which is not supported"
            )

    if int(getattr(parallel, "nnodes_within_dp", 1) or 1) > 1:
        raise UnsupportedModel(
            "an engine that spans nodes leaves each node's daemon with slices alone, which is not supported"
        )


def _single_process(vllm_config: Any) -> bool:
    """Whether vLLM's scheduler and its one worker share a process."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    return int(parallel.world_size) == 1 and backend in ("uni", None)
