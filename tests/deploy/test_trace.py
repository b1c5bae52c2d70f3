from typing import Any

from deploy.trace import chrome_trace, summary


def step(lane: str, start_s: float, ms: float, **counts: int) -> dict[str, Any]:
    names = ("decodes", "decode_context", "prefills", "prefill_tokens", "prefill_context", "waiting", "waiting_tokens")
    zeros = dict.fromkeys(names, 0)
    return {"worker": "combined-0", "lane": lane, "share": 0.5, "start_s": start_s, "ms": ms, **zeros, **counts}


def test_steps_on_two_lanes_are_events_on_two_threads() -> None:
    trace = chrome_trace(
        [
            step("prefill", 1000.0, 90.0, prefill_tokens=512, prefills=1),
            step("decode", 1000.01, 40.0, decodes=8),
            step("decode", 1000.05, 40.0, decodes=8, waiting=3),
        ]
    )
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert [(event["name"], names[event["tid"]]) for event in spans] == [
        ("prefill 512", "prefill"),
        ("decode 8", "decode"),
        ("decode 8", "decode"),
    ]
    begin, end = spans[0]["ts"], spans[0]["ts"] + spans[0]["dur"]
    assert all(begin < round(event["ts"]) and round(event["ts"] + event["dur"]) <= end for event in spans[1:])
    waiting = [event["args"]["sequences"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert waiting == [0, 0, 3]


def test_no_steps_make_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_it_says_what_it_wrote_and_how_to_open_it() -> None:
    steps = [step("full", 1000.0, 10.0), {**step("full", 1002.5, 10.0), "worker": "combined-1"}]
    assert summary(steps, chrome=True).startswith("2 steps of 2 workers within 2.5 s. Open the file at https://ui.perf")
    assert summary(steps[:1], chrome=False).startswith("1 step of 1 worker within 0.0 s, one JSON document a line.")
    assert summary([], chrome=False).startswith("0 steps of 0 workers")
