"""Figures of the connector, through vLLM's own hooks: its log line and its Prometheus endpoint."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

NAMES = (
    "load_requests",
    "load_tokens",
    "load_seconds",
    "save_blocks",
    "save_tokens",
    "save_seconds",
    "save_cpu_seconds",
    "failed_loads",
)
"""What is counted; every one only ever grows."""

_TEXTS = {
    "load_requests": "Loads of kept KV into vLLM's pages",
    "load_tokens": "Tokens whose KV was loaded instead of computed",
    "load_seconds": "Seconds spent on loads",
    "save_blocks": "Blocks stored",
    "save_tokens": "Tokens whose KV was stored",
    "save_seconds": "Seconds spent on storing, behind the engine",
    "save_cpu_seconds": "Processor seconds spent on storing, behind the engine",
    "failed_loads": "Loads that failed and were answered by computing",
}


@dataclass
class Stats(KVConnectorStats):  # type: ignore[misc]
    """An interval's counts, by name."""

    def __post_init__(self) -> None:
        for name in NAMES:
            self.data.setdefault(name, 0)

    def reset(self) -> None:
        self.data = dict.fromkeys(NAMES, 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in NAMES:
            self.data[name] += other.data.get(name, 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


@dataclass
class Counts:
    """Counts since the last `take`. Safe from several threads."""

    failed_loads: int = 0
    loaded_seconds: float = 0.0
    """Of all loads so far; never taken away."""
    _data: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_load(self, tokens: int, seconds: float) -> None:
        """One load of so many tokens."""
        with self._lock:
            self._data["load_requests"] += 1
            self._data["load_tokens"] += tokens
            self._data["load_seconds"] += seconds
            self.loaded_seconds += seconds

    def add_save(self, tokens: int, seconds: float, cpu_seconds: float) -> None:
        """One block stored, of so many tokens."""
        with self._lock:
            self._data["save_blocks"] += 1
            self._data["save_tokens"] += tokens
            self._data["save_seconds"] += seconds
            self._data["save_cpu_seconds"] += cpu_seconds

    def take(self) -> Stats | None:
        """The counts, which begin anew; None where nothing happened."""
        with self._lock:
            data, self._data = self._data, dict.fromkeys(NAMES, 0)
            data["failed_loads"], self.failed_loads = self.failed_loads, 0
        stats = Stats(data=dict(data))
        return None if stats.is_empty() else stats


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus counters `vllm:retain_*`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter: Any = metric_types[Counter]
        self._counters = {
            name: counter(name=f"vllm:retain_{name}", documentation=_TEXTS[name], labelnames=labelnames)
            for name in NAMES
        }
        self._labels = per_engine

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counter in self._counters.items():
            value = transfer_stats_data.get(name, 0)
            if value > 0:  # a counter that is asked to fall raises
                counter.labels(*self._labels[engine_idx]).inc(value)
