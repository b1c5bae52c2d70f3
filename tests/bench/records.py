"""Records of requests, as a client makes them."""

from typing import Any

from bench.record import Record


def completed(due_s: float = 0.0, ttft_s: float = 0.1, gaps_s: list[float] | None = None, **fields: Any) -> Record:
    """A request that was sent when it was due; its stream ended with its last chunk. `gaps_s` are two of 10 ms if
    not given; every chunk is one token."""
    content_s = [due_s + ttft_s]
    for gap_s in [0.01, 0.01] if gaps_s is None else gaps_s:
        content_s.append(content_s[-1] + gap_s)
    known: dict[str, Any] = {
        "session": 0,
        "turn": 0,
        "input_len": 8,
        "output_len": len(content_s),
        "due_s": due_s,
        "sent_s": due_s,
        "content_s": content_s,
        "answer_s": content_s[0],
        "ended_s": content_s[-1],
        "status": 200,
        "prompt_tokens": 8,
        "output_tokens": len(content_s),
        "finish_reason": "length",
    }
    return Record(**{**known, **fields})


def failed(error: str, due_s: float = 0.0, ended_s: float = 1.0, **fields: Any) -> Record:
    """A request that failed without output."""
    known: dict[str, Any] = {"session": 0, "turn": 0, "input_len": 8, "output_len": 8, "due_s": due_s, "sent_s": due_s}
    return Record(**{**known, **fields}, ended_s=ended_s, error=error)
