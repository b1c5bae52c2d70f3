"""Traces of requests through real processes, as a collector gets them."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from models import tiny
from tests.e2e.cluster import START_S, Cluster, eventually
from tests.otlp import Collector, SentSpan, collector

pytestmark = pytest.mark.e2e

SECRET_WORD = "xylophone"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def sent() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(sent: Collector) -> Iterator[Cluster]:
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name="tiny",
        prefill=1,
        combined=2,
        long_prefill_tokens=200,
        otlp_endpoint=sent.endpoint,
    ) as running:
        yield running


def _chat(cluster: Cluster, text: str, headers: dict[str, str] | None = None, **fields: object) -> str:
    """Asks for an answer; returns the request's id."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=START_S)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


def _trace(sent: Collector, request_id: str, count: int) -> list[SentSpan]:
    """The request's spans, once there are `count`: each process sends its own when it likes."""
    eventually(lambda: len(sent.of(request_id)) >= count, f"{count} spans have come")
    spans = sent.of(request_id)
    assert len(spans) == count, [span.name for span in spans]
    return spans


def _below(spans: list[SentSpan], parent: SentSpan) -> list[SentSpan]:
    return [span for span in spans if span.parent == parent.id]


def _one(spans: list[SentSpan], name: str) -> SentSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_a_local_request_has_one_trace_with_its_phases(cluster: Cluster, sent: Collector) -> None:
    spans = _trace(sent, _chat(cluster, "Hello?", temperature=0.5), 7)
    root = _one(spans, "chat tiny")
    assert (root.process, root.kind, root.parent, root.error) == ("router-0", 2, "", "")
    about = root.attributes
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.request.model"] == "tiny"
    assert (about["gen_ai.request.max_tokens"], about["gen_ai.request.temperature"]) == (8, 0.5)
    assert about["gen_ai.usage.output_tokens"] <= 8
    assert about["gen_ai.response.finish_reasons"][0] in ("stop", "length")
    assert [span.name for span in _below(spans, root)] == ["prepare", "attempt"]
    answer = _one(spans, "answer")
    assert answer.parent == _one(spans, "attempt").id
    assert re.fullmatch("combined-[01]", answer.process)
    phases = _below(spans, answer)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert sum(span.ms for span in phases) == pytest.approx(answer.ms, rel=0.05, abs=1.0)


def test_a_remote_request_has_one_trace_through_three_processes(cluster: Cluster, sent: Collector) -> None:
    words = " ".join(f"number {number}" for number in range(200))
    spans = _trace(sent, _chat(cluster, f"{words} {SECRET_WORD}", {"traceparent": TRACEPARENT}), 11)
    root = _one(spans, "chat tiny")
    assert (root.trace, root.parent) == tuple(TRACEPARENT.split("-")[1:3])
    answer, call = _one(spans, "answer"), _one(spans, "remote prefill")
    phases = _below(spans, answer)
    assert [span.name for span in phases] == ["remote prefill", "transfer", "decode"]
    assert sum(span.ms for span in phases) == pytest.approx(answer.ms, rel=0.05, abs=1.0)
    (job,) = _below(spans, call)
    assert (job.name, job.process, job.kind, job.error) == ("prefill", "prefill-0", 2, "")
    assert sorted(span.name for span in _below(spans, job)) == ["prefill", "queue", "transfer"]
    moved = next(span for span in _below(spans, job) if span.name == "transfer")
    assert moved.attributes["cpd.pages"] > 10
    assert {span.process for span in spans} == {"router-0", "prefill-0", answer.process}
    assert len({span.trace for span in spans}) == 1
    assert not any(SECRET_WORD.encode() in body or b"number 17" in body for body in sent.bodies)


def test_a_grammar_is_a_phase(cluster: Cluster, sent: Collector) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    spans = _trace(sent, _chat(cluster, "Some JSON, please.", response_format=schema), 8)
    assert _below(spans, _one(spans, "answer"))[0].name == "grammar"


def test_a_refused_call_is_an_error(cluster: Cluster, sent: Collector) -> None:
    headers = {"x-request-id": "refused-1"}
    response = httpx.post(
        f"{cluster.url}/v1/chat/completions", json={"model": "other"}, headers=headers, timeout=START_S
    )
    assert response.status_code >= 400
    eventually(lambda: bool(sent.of("refused-1")), "it is sent")
    (root,) = sent.of("refused-1")
    assert root.attributes["http.response.status_code"] == response.status_code
    assert root.error == root.attributes["error.type"] == response.json()["error"]["code"]


def test_a_replayed_answer_shows_both_attempts(cluster: Cluster, sent: Collector) -> None:
    body = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=START_S) as response:
        lines = response.iter_lines()
        next(lines)
        worker = response.headers["x-cpd-decode-worker"]
        cluster.kill(worker)
        data = [line for line in lines if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]"
    assert not any("error" in json.loads(line[6:]) for line in data[:-1])
    request_id = response.headers["x-request-id"]
    eventually(lambda: any(span.name.startswith("text_completion") for span in sent.of(request_id)), "it is sent")
    spans = sent.of(request_id)
    attempts = [span for span in spans if span.name == "attempt"]
    assert [span.error for span in attempts] == ["worker lost", ""]
    assert attempts[0].attributes["cpd.worker"] == worker != attempts[1].attributes["cpd.worker"]
    cluster.wait_until_healthy()


def test_nothing_is_sent_of_requests_that_are_not_sampled(cluster: Cluster, sent: Collector) -> None:
    request_id = _chat(cluster, "Hello?", {"traceparent": f"{TRACEPARENT[:-1]}0"})
    after = _chat(cluster, "Hello again?")
    _trace(sent, after, 7)
    assert sent.of(request_id) == []
