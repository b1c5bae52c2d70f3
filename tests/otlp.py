"""A collector that keeps the spans that it gets by OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SentSpan:
    """A span as it came. Times are in ns since 1970.

    Attributes:
        process: Name of the process that sent it.
        kind: 1 internal, 2 server, 3 client.
        error: Its error; empty if there is none.
    """

    process: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    error: str
    attributes: dict[str, Any]

    @property
    def ms(self) -> float:
        """Its duration."""
        return (self.end - self.start) / 1e6


@dataclass
class Collector:
    """What has come so far.

    Attributes:
        endpoint: What to give to `--otlp-endpoint`.
        bodies: The requests' bodies.
    """

    endpoint: str = ""
    spans: list[SentSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def of(self, request_id: str) -> list[SentSpan]:
        """The spans of the trace of a request, by their start."""
        spans = list(self.spans)
        traces = {span.trace for span in spans if span.attributes.get("cpd.request_id") == request_id}
        assert len(traces) <= 1, "one request has several traces"
        return sorted((span for span in spans if span.trace in traces), key=lambda span: span.start)

    def take(self, body: bytes) -> None:
        """Takes a request's body."""
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = next(
                one.value.string_value for one in resource.resource.attributes if one.key == "service.instance.id"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SentSpan(
                            process,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.message if span.status.code == 2 else "",
                            {one.key: _value(one.value) for one in span.attributes},
                        )
                    )


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a port of this machine."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                made.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
