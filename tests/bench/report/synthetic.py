"""Synthetic results that resemble real runs: two routes, some errors, and a server that stalls once."""

from dataclasses import dataclass

import numpy as np

from bench.metrics import summarise
from bench.record import Failure, Record
from bench.result import Accuracy, Client, Result
from bench.slo import Slo


@dataclass(frozen=True)
class Server:
    """Behaviour of the synthetic server. `speed` divides its compute times; at `stall_s` it stops for a second."""

    speed: float = 1.0
    stall_s: float | None = 30.0
    failures: int = 3
    tells_usage: bool = True
    names_routes: bool = True


def synthetic_result(
    label: str = "mock-7b",
    server: Server | None = None,
    *,
    requests: int = 500,
    rate: float = 8.0,
    turns: int = 1,
    seed: int = 0,
    limited: bool = False,
    interrupted: bool = False,
) -> Result:
    """An open-loop run of `requests` sessions, `rate` a second."""
    server = server or Server()
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate, requests))
    failed = set(rng.choice(requests, min(server.failures, requests), replace=False).tolist())
    records = []
    for session in range(requests):
        begin_s = float(due_s[session])
        for turn in range(turns):
            record = _request(server, rng, session, turn, begin_s)
            if turn == 0 and session in failed:
                _fail(record, rng)
            records.append(record)
            begin_s = record.ended_s + 2.0
    offered_per_s = (requests - 1) / float(due_s[-1] - due_s[0]) if requests > 1 else None
    summary, rows = summarise(records, start_s=0.0, slo=Slo.parse("ttft=800,itl=50"), offered_per_s=offered_per_s)
    command = f"cpd bench run --rate {rate:g} --num-requests {requests} --slo ttft=800,itl=50"
    return Result(
        label=label,
        command=command.split(),
        started_at="2025-11-20T12:00:00+00:00",
        versions={"cpd": "0.1.0", "python": "3.11.9", "server": "mock 1.0"},
        settings={
            "url": "http://127.0.0.1:8000",
            "model": label,
            "workload": "random",
            "input_len": "uniform:64,4096",
            "rate": rate,
            "slo": "ttft=800,itl=50",
        },
        seed=seed,
        interrupted=interrupted,
        cluster_before=None,
        cluster_after=None,
        client=Client(
            limited=limited,
            reasons=["The event loop was 41 ms late (p99); 5 ms would do."] if limited else [],
            processes=1,
            cpu_share=0.98 if limited else 0.31,
            loop_lag_ms_p50=0.1,
            loop_lag_ms_p99=41.0 if limited else 0.4,
            machine_share=0.2,
            machine_idle=0.3,
            selftest=Accuracy(
                streams=64, chunks_per_s=12_800, ttft_error=0.004, itl_error=0.002, delay_ms_p50=0.1, delay_ms_p99=0.5
            ),
        ),
        summary=summary,
        requests=rows,
    )


def _request(server: Server, rng: np.random.Generator, session: int, turn: int, due_s: float) -> Record:
    prompt = int(rng.integers(64, 4096)) + 600 * turn
    cached = int(prompt * (rng.random() * 0.3 if turn == 0 else 0.8))
    output = int(np.clip(rng.lognormal(np.log(96), 0.5), 2, 512))
    sent_s = due_s + float(rng.exponential(2e-4))
    long = prompt - cached > 1024
    prefill_ms = 25 + 0.12 * (prompt - cached) * (0.8 if long else 1.0) + rng.exponential(25)
    gaps_ms = 8.0 + rng.gamma(2.0, 0.7, output - 1) + 30 * (rng.random(output - 1) < 0.004)
    if long:
        gaps_ms[0] += 12
    stamps = sent_s + np.cumsum([prefill_ms, *gaps_ms]) / 1e3 / server.speed
    if server.stall_s is not None and sent_s < server.stall_s + 1:
        rest_s = 1 - max(0.0, sent_s - server.stall_s)
        stamps = np.where(stamps < server.stall_s, stamps, stamps + rest_s)
    ended_s = float(stamps[-1]) + 4e-4
    return Record(
        session=session,
        turn=turn,
        input_len=prompt,
        output_len=output,
        due_s=due_s,
        sent_s=sent_s,
        content_s=stamps.tolist(),
        answer_s=float(stamps[0]),
        ended_s=ended_s,
        status=200,
        prompt_tokens=prompt if server.tells_usage else None,
        output_tokens=output if server.tells_usage else None,
        cached_tokens=cached if server.tells_usage else None,
        finish_reason="length",
        route=("remote" if long else "local") if server.names_routes else "",
        worker=f"combined-{session % 3}" if server.names_routes else "",
    )


def _fail(record: Record, rng: np.random.Generator) -> None:
    if rng.random() < 0.5:
        record.error, record.status = "http_503", 503
        record.detail, record.route = "the waiting queue is full; try again in 2 s", ""
        record.content_s, record.answer_s = [], None
        record.ended_s = record.sent_s + 0.003
    else:
        record.error, record.detail = Failure.DISCONNECTED, "connection closed by the server after 31 chunks"
        record.content_s = record.content_s[:31]
        record.ended_s = record.content_s[-1]
    record.finish_reason = ""
