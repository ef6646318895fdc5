"""Metrics in Prometheus's conventions. Counting never disturbs a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from retain.cache import Stats
from retain.gateway.answers import Account

log = logging.getLogger("retain.gateway")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Buckets from a warm start on a fast machine to a cold prefill of a long document on a slow one."""


class Queue(Protocol):
    """What is told of the waiting line."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...


class Meter:
    """The server's own counters, in a registry of their own."""

    def __init__(self, queue: Queue, stats: Callable[[], Stats | None]) -> None:
        self._registry = CollectorRegistry()
        self._failed = Counter(
            "retain_stats_errors",
            "Times that counting failed; no request was disturbed.",
            registry=self._registry,
        )
        self._responses = Counter(
            "retain_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self._registry,
        )
        self._requests = Counter(
            "retain_requests",
            "Generations by how they ended: stop, length, tool_calls, cancelled, failed.",
            ["finish"],
            registry=self._registry,
        )
        self._refused = Counter(
            "retain_queue_refused", "Requests refused because the queue was full.", registry=self._registry
        )
        self._prompt = Counter(
            "retain_prompt_tokens",
            "Tokens of prompts by where their KV came from.",
            ["source"],
            registry=self._registry,
        )
        self._classes = Counter(
            "retain_reused_tokens",
            "Tokens of prompts whose KV was read, by class: exact, kin, kin-quantised, lossy.",
            ["class"],
            registry=self._registry,
        )
        self._generated = Counter("retain_generated_tokens", "Tokens generated.", registry=self._registry)
        self._written = Counter(
            "retain_cache_write_tokens", "Tokens whose KV was newly kept.", registry=self._registry
        )
        self._misses = Counter(
            "retain_misses",
            "Prompts of which kept KV could not be used in whole, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self._saved = Counter(
            "retain_saved_seconds", "Prefill seconds saved, as predicted.", registry=self._registry
        )
        self._ttft = Histogram(
            "retain_ttft_seconds",
            "Time to the first token, without the time in the queue, by whether KV was reused.",
            ["reused"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._queued = Histogram(
            "retain_queue_seconds", "Time in the queue.", buckets=SECONDS, registry=self._registry
        )
        Gauge("retain_queue_waiting", "Requests that wait.", registry=self._registry).set_function(
            lambda: queue.waiting
        )
        Gauge("retain_queue_running", "Requests that run.", registry=self._registry).set_function(
            lambda: queue.running
        )
        for source in ("memory", "disk", "computed"):
            self._prompt.labels(source)
        for finish in ("stop", "length", "tool_calls", "cancelled", "failed"):
            self._requests.labels(finish)
        self._registry.register(_CacheCollector(stats, self._failed))

    def responded(self, path: str, status: int) -> None:
        """A response began."""
        self._safely(lambda: self._responses.labels(path, str(status)).inc())

    def refused(self) -> None:
        """A request found the queue full."""
        self._safely(self._refused.inc)

    def failed(self) -> None:
        """A generation ended with an error."""
        self._safely(lambda: self._requests.labels("failed").inc())

    def abandoned(self) -> None:
        """A client hung up before its generation began."""
        self._safely(lambda: self._requests.labels("cancelled").inc())

    def ended(self, account: Account) -> None:
        """A generation ended: well, or because its client had gone."""
        self._safely(lambda: self._record(account))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _record(self, account: Account) -> None:
        ending = account.ending
        report = ending.report
        self._requests.labels(ending.reason).inc()
        for source, tokens in [*report.tokens_by_tier.items(), ("computed", report.computed)]:
            _add(self._prompt.labels(source), tokens)
        for name, tokens in report.classes.items():
            _add(self._classes.labels(name), tokens)
        _add(self._generated, ending.generated)
        _add(self._written, report.written)
        _add(self._saved, report.saved_seconds or 0.0)
        self._queued.observe(max(0.0, account.queued_seconds))
        if account.ttft_seconds is not None:
            seconds = max(0.0, account.ttft_seconds - account.queued_seconds)
            self._ttft.labels("yes" if report.reused > 0 else "no").observe(seconds)
        if account.miss is not None:
            self._misses.labels(account.miss.reason).inc()

    def _safely(self, count: Callable[[], None]) -> None:
        try:
            count()
        except Exception:
            self._failed.inc()
            log.exception("counting failed; the request goes on")


def _add(counter: Counter, amount: float) -> None:
    """A counter never falls, though a load that fails after its lookup may make a figure negative."""
    if amount > 0:
        counter.inc(amount)


class _CacheCollector:
    """Reads the cache's statistics when Prometheus asks. Counters are held at the highest value seen."""

    def __init__(self, stats: Callable[[], Stats | None], failed: Counter) -> None:
        self._stats = stats
        self._failed = failed
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, str], float] = {}
        self._last: Stats | None = None

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not ask the cache before it is there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            self._last = self._stats() or self._last
        except Exception:
            self._failed.inc()
            log.exception("the cache's statistics cannot be had; the last ones are shown")
        stats = self._last
        if stats is None:
            return
        for name, value in sorted(stats.counters.items()):
            metric = f"retain_cache_{name}"
            family = CounterMetricFamily(metric, f"The cache's counter {name.replace('_', ' ')}.")
            family.add_metric([], self._rising(metric, "", value))
            yield family
        failures = CounterMetricFamily(
            "retain_cache_failures", "Failures that were treated as misses, by reason.", labels=["reason"]
        )
        for reason, value in sorted(stats.failures.items()):
            failures.add_metric([reason], self._rising("failures", reason, value))
        yield failures
        for field, name, told in (
            ("objects", "retain_tier_objects", "Objects that a tier holds."),
            ("bytes", "retain_tier_resident_bytes", "Bytes that a tier holds."),
            ("capacity", "retain_tier_capacity_bytes", "Bytes that a tier may hold."),
            ("leased", "retain_tier_leased_objects", "Objects in use."),
            ("pinned", "retain_tier_pinned_objects", "Objects that are never evicted."),
        ):
            gauge = GaugeMetricFamily(name, told, labels=["tier"])
            for tier, state in stats.tiers.items():
                gauge.add_metric([tier], getattr(state, field))
            yield gauge
        pending = GaugeMetricFamily(
            "retain_cache_pending_writes", "Blocks on their way to the tiers below memory."
        )
        pending.add_metric([], stats.pending_writes)
        yield pending

    def _rising(self, metric: str, label: str, value: float) -> float:
        with self._lock:
            highest = max(value, self._highest.get((metric, label), 0))
            self._highest[metric, label] = highest
            return highest
