"""Figures of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foveakv.errors import MissingDependencyError
from foveakv.serving.errors import INSTALL

if TYPE_CHECKING:
    from foveakv.serving.engine import Status
    from foveakv.serving.job import Job

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters and histograms of one server, in a registry of its own; gauges are read when Prometheus asks."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise MissingDependencyError(f"the server needs prometheus-client: {INSTALL}") from error
        self._prometheus = prometheus
        self.registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return prometheus.Counter(f"foveakv_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Any:
            return prometheus.Histogram(f"foveakv_{name}", text, buckets=_SECONDS, registry=self.registry)

        self._requests = counter("requests", "Requests that reached the engine, by outcome", ("outcome", "method"))
        self._responses = counter("http_responses", "HTTP responses of /v1, by status", ("status",))
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were read")
        self._generated = counter("generated_tokens", "Generated tokens")
        self._evicted = counter("evicted_slots", "Evicted slots of complete requests")
        self._retrieved = counter("retrieved_slots", "Retrieved slots of complete requests")
        self._hits = counter("retrieved_slot_hits", "Retrieved slots that were already on the device")
        self._first = histogram("time_to_first_token_seconds", "From the queue to the first text")
        self._queue = histogram("queue_seconds", "Time in the queue")
        self._seconds = histogram("request_seconds", "From the queue to the end")
        self._prefill = histogram("prefill_seconds", "Time of the prefill")

    def watch(self, status: Callable[[], Status], kv_bytes: int) -> None:
        """Read the gauges from an engine's status. kv_bytes: its limit."""

        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            self._prometheus.Gauge(f"foveakv_{name}", text, registry=self.registry).set_function(read)

        gauge("queue_requests", "Requests that wait", lambda: status().queue)
        gauge("running_answers", "Answers that are being decoded", lambda: status().running)
        gauge("kv_stored_bytes", "KV bytes stored on the device", lambda: status().stored_bytes)
        gauge("kv_full_bytes", "KV bytes of the same tokens without compression", lambda: status().full_bytes)
        gauge("kv_host_bytes", "KV bytes in backing stores", lambda: status().host_bytes)
        gauge("kv_reserved_bytes", "KV bytes that running requests may come to store", lambda: status().reserved_bytes)
        gauge("kv_limit_bytes", "Limit of the KV bytes", lambda: kv_bytes)
        gauge("hit_rate", "Share of retrieved slots that were already on the device", self._hit_rate)

    def _hit_rate(self) -> float:
        retrieved = self._retrieved._value.get()
        return float(self._hits._value.get() / retrieved) if retrieved else 0.0

    def response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(str(status)).inc()

    def prefilled(self, job: Job) -> None:
        """Count a prompt that was read."""
        started = job.started or job.submitted
        self._prompt.inc(job.prompt_tokens)
        self._queue.observe(started - job.submitted)
        self._prefill.observe((job.prefilled or started) - started)

    def token(self) -> None:
        """Count a generated token."""
        self._generated.inc()

    def ended(self, job: Job, outcome: str) -> None:
        """Count a request at its end; outcome: ok, error or cancelled."""
        import time

        self._requests.labels(outcome, job.generation.choice.method.name).inc()
        self._seconds.observe(time.monotonic() - job.submitted)
        if job.first is not None:
            self._first.observe(job.first - job.submitted)
        for answer in job.answers:
            if answer.final is not None:
                self._evicted.inc(answer.final.evicted)
                self._retrieved.inc(answer.final.retrieved)
                self._hits.inc(sum(layer.hits for layer in answer.final.layers))

    def text(self) -> bytes:
        """The page for Prometheus."""
        return bytes(self._prometheus.generate_latest(self.registry))

    @property
    def content_type(self) -> str:
        """The type of `text`."""
        return str(self._prometheus.CONTENT_TYPE_LATEST)
