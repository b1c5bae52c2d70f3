import subprocess
import sys
import time

from cpd.common.tracing import TracedSpan, Tracing
from tests.otlp import Collector, SentSpan, collector

SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
NOT_SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


def _begin(tracing: Tracing, started: float = 0.0, parent: dict[str, str] | None = None) -> TracedSpan:
    span = tracing.begin("root", started or time.monotonic(), parent or {})
    assert span is not None
    return span


def _start(to: Collector, share: float = 1.0) -> Tracing:
    return Tracing(to.endpoint, service="cpd-router", instance="router-0", cluster="test", share=share)


def _named(spans: list[SentSpan], name: str) -> SentSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_phases_follow_one_another_and_have_the_times_that_were_told() -> None:
    with collector() as sent:
        tracing, now = _start(sent), time.monotonic()
        root = _begin(tracing, now - 1.0)
        root.phase("first", now - 0.6)
        root.phase("second", now - 0.7)  # a time before the last phase's end counts as that
        opened = root.open_phase("third", "CLIENT", {"cpd.worker": "prefill-0"})
        root.close_phase(opened, now - 0.1, "it broke")
        root.name("chat tiny")
        root.end(now)
        tracing.close()
    spans = sent.spans
    whole = _named(spans, "chat tiny")
    parts = [_named(spans, name) for name in ("first", "second", "third")]
    assert whole.parent == ""
    assert {part.parent for part in parts} == {whole.id}
    assert [round(part.ms) for part in (*parts, whole)] == [400, 0, 500, 1000]
    assert abs(whole.end - time.time_ns()) < 60e9
    assert (parts[2].kind, parts[2].error, parts[2].attributes) == (3, "it broke", {"cpd.worker": "prefill-0"})
    assert {span.process for span in spans} == {"router-0"}


def test_another_process_continues_the_trace() -> None:
    with collector() as sent:
        tracing, other = _start(sent), _start(sent, share=0.0)
        root = _begin(tracing)
        below = _begin(other, parent={"traceparent": root.traceparent})
        for span in (below, root):
            span.end(time.monotonic())
        tracing.close()
        other.close()
    first, second = sorted(sent.spans, key=lambda span: span.parent)
    assert (second.trace, second.parent) == (first.trace, first.id)


def test_the_client_decides_about_its_own_trace() -> None:
    with collector() as sent:
        tracing = _start(sent, share=0.0)
        assert tracing.begin("root", time.monotonic(), {}) is None
        _begin(tracing, parent=SAMPLED).end(time.monotonic())
        tracing.close()
        everything = _start(sent)
        assert everything.begin("root", time.monotonic(), NOT_SAMPLED) is None
        _begin(everything, parent={"traceparent": "nonsense"}).end(time.monotonic())
        everything.close()
    known, unknown = sent.spans
    assert (known.trace, known.parent) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert unknown.parent == ""


def test_a_collector_that_does_not_answer_delays_the_end_by_a_second_at_most() -> None:
    with collector() as sent:
        endpoint = sent.endpoint
    tracing = Tracing(endpoint, service="cpd-router", instance="router-0", cluster="test", share=1.0)
    _begin(tracing).end(time.monotonic())
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 10.0  # the machine may be busy


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    services = "router.server, decode_worker.service, prefill_worker.service, worker.worker"
    code = f"import sys, {services}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "router.server" in loaded
    assert [name for name in loaded if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))] == []
