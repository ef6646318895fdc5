"""What the relay counts, in Prometheus's conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from retain.gateway.metrics import SECONDS

if TYPE_CHECKING:
    from retain.relay.upstream import Upstream

ENDS = ("answered", "refused", "failed", "cancelled")
PREFILLS = ("done", "failed", "short", "whole", "handed")
REASONS = ("refused", "broken", "timeout", "status", "busy", "down", "large")


class Meter:
    """The relay's counters, in a registry of their own."""

    def __init__(self, running: Callable[[], int], servers: list[Upstream]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "retain_relay_requests",
            "Requests by how they ended: answered; refused, by the relay or a server (4xx); failed, without "
            "an answer or in the middle of one; cancelled, by a client that hung up.",
            ["end"],
            registry=registry,
        )
        self._prefills = Counter(
            "retain_relay_prefills",
            "Prompts by what became of their prefill: done; failed, and left to the decode server; not tried "
            "as the prompt is short, its whole work is needed, or it was handed over before.",
            ["result"],
            registry=registry,
        )
        self._prefill_failures = Counter(
            "retain_relay_prefill_failures", "Failures of prefill servers.", ["reason"], registry=registry
        )
        self._decode_failures = Counter(
            "retain_relay_decode_failures", "Failures of decode servers.", ["reason"], registry=registry
        )
        self._prefill_seconds = Histogram(
            "retain_relay_prefill_seconds",
            "Time of the prefill step, well or not.",
            buckets=SECONDS,
            registry=registry,
        )
        self._first_seconds = Histogram(
            "retain_relay_first_byte_seconds",
            "Time from a request's arrival to the first byte of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._seconds = Histogram(
            "retain_relay_request_seconds", "Time of a request.", buckets=SECONDS, registry=registry
        )
        Gauge("retain_relay_running", "Requests under way.", registry=registry).set_function(running)
        registry.register(_Servers(servers))
        for counter, labels in (
            (self._requests, ENDS),
            (self._prefills, PREFILLS),
            (self._prefill_failures, (*REASONS, "rejected")),
            (self._decode_failures, REASONS),
        ):
            for label in labels:
                counter.labels(label)

    def ended(self, end: str, seconds: float) -> None:
        """A request is over."""
        self._requests.labels(end).inc()
        self._seconds.observe(seconds)

    def began(self, seconds: float) -> None:
        """The first byte of an answer went out."""
        self._first_seconds.observe(seconds)

    def prefilled(self, result: str, seconds: float | None = None) -> None:
        """The prefill step is over, or was left out."""
        self._prefills.labels(result).inc()
        if seconds is not None:
            self._prefill_seconds.observe(seconds)

    def prefill_failed(self, reason: str) -> None:
        self._prefill_failures.labels(reason).inc()

    def decode_failed(self, reason: str) -> None:
        self._decode_failures.labels(reason).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)


class _Servers:
    """The state of the servers, read when Prometheus asks."""

    def __init__(self, servers: list[Upstream]) -> None:
        self._servers = servers

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "retain_relay_server_up", "Whether a server is asked.", labels=["role", "server"]
        )
        running = GaugeMetricFamily(
            "retain_relay_server_running", "Requests at a server.", labels=["role", "server"]
        )
        for server in self._servers:
            up.add_metric([server.role, server.name], float(server.remote.up))
            running.add_metric([server.role, server.name], server.running)
        yield up
        yield running
