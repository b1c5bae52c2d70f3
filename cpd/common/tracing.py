"""Traces of requests, which each process sends by OTLP over HTTP (--otlp-endpoint).

A request has one trace, through all processes. A router begins it, or goes on with that of the client
(`traceparent`), and has a span for each attempt on a worker. What it sends to the worker names that span, and the
worker's spans are below it; likewise with what a worker asks of another one.

Requests that are not sampled have no span: code asks once whether there is one, and for no token. This module is
imported only with an endpoint, because it imports OpenTelemetry's SDK. Prompts and outputs are in no span.

All times are those of `time.monotonic`, in seconds, which are also those of event loops.
"""

import time
from collections.abc import Mapping
from importlib.metadata import version
from threading import Thread
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | bool | int | float | list[str]

Kind = Literal["SERVER", "CLIENT", "INTERNAL"]

SEND_MS = 1000
"""Interval at which spans that have ended are sent, in ms."""

FLUSH_S = 0.5
"""Time limit for sending what is left at the end, in seconds."""


class Tracing:
    """Sends a process's spans.

    Args:
        endpoint: URL of the collector, without `/v1/traces`.
        service: Name of the kind of process.
        instance: Name of the process.
        cluster: Name of the cluster.
        share: Share of the requests that are sampled, of those whose sender does not say whether they are.
    """

    def __init__(self, endpoint: str, *, service: str, instance: str, cluster: str, share: float = 0.0) -> None:
        about = {
            "service.name": service,
            "service.namespace": cluster,
            "service.instance.id": instance,
            "service.version": version("cpd"),
        }
        sampler = ParentBased(TraceIdRatioBased(share))
        provider = TracerProvider(sampler, Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._sender = BatchSpanProcessor(exporter, schedule_delay_millis=SEND_MS)
        provider.add_span_processor(self._sender)
        self._tracer = provider.get_tracer("cpd")
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, started: float, parent: Mapping[str, str], attributes: Mapping[str, Value] | None = None
    ) -> "TracedSpan | None":
        """Begins this process's part of a request.

        Args:
            parent: `traceparent` and perhaps `tracestate`, as in HTTP headers; empty: there is none.

        Returns:
            None if the request is not sampled.
        """
        context = self._propagator.extract(parent)
        span = TracedSpan(self._tracer, name, started, "SERVER", context=context, attributes=attributes)
        return span if span.recording else None

    def close(self) -> None:
        """Sends what is left, within FLUSH_S. Blocks."""
        sending = Thread(target=self._sender.shutdown, daemon=True)  # would take up to half a minute
        sending.start()
        sending.join(FLUSH_S)


class TracedSpan:
    """A span of a sampled request. `end` must be called."""

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        started: float,
        kind: Kind,
        *,
        context: Context | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        self._tracer = tracer
        self._at = started
        self._span = tracer.start_span(name, context, SpanKind[kind], attributes, start_time=_since_1970_ns(started))

    @property
    def recording(self) -> bool:
        """True if it is sampled."""
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """Names the span to another process."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self, name: str, started: float, kind: Kind = "INTERNAL", attributes: Mapping[str, Value] | None = None
    ) -> "TracedSpan":
        """Begins a span below this one."""
        context = set_span_in_context(self._span)
        return TracedSpan(self._tracer, name, started, kind, context=context, attributes=attributes)

    def phase(self, name: str, until: float, attributes: Mapping[str, Value] | None = None) -> None:
        """Adds a span below this one, from the end of the last phase, or this span's start, up to `until`."""
        self.close_phase(self.open_phase(name, attributes=attributes), until)

    def open_phase(
        self, name: str, kind: Kind = "INTERNAL", attributes: Mapping[str, Value] | None = None
    ) -> "TracedSpan":
        """Begins a phase where the last one ended. `close_phase` ends it."""
        return self.child(name, self._at, kind, attributes)

    def close_phase(self, phase: "TracedSpan", at: float, error: str = "") -> None:
        """Ends a phase; the next one begins there."""
        self._at = max(self._at, at)
        phase.end(self._at, error)

    def name(self, name: str) -> None:
        """Changes the name."""
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Sets attributes."""
        self._span.set_attributes(attributes)

    def end(self, at: float, error: str = "") -> None:
        """Ends the span, with an error if there is one. Later calls change nothing."""
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(_since_1970_ns(at))


def _since_1970_ns(at: float) -> int:
    return time.time_ns() - round((time.monotonic() - at) * 1e9)
