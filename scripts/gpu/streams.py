"""Times work on CUDA streams: alone, beside other work, and several pieces until all are done."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scripts.gpu.common import Timing, measure_ms

Launch = Callable[[], object]
"""Launches one piece of work on the current stream."""

_MARGIN = 1.3
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Work that is launched on a stream piece by piece."""

    stream: torch.cuda.Stream
    launch: Launch


def alone_ms(load: Load, repeats: int = 15) -> float:
    """Median time of a piece on an idle device, ms."""
    torch.cuda.synchronize()
    with torch.cuda.stream(load.stream):
        return measure_ms(lambda _: load.launch(), warmup=3, repeats=repeats).median


def beside_ms(load: Load, other: Load, repeats: int = 15) -> float:
    """Median time of a piece while the other load runs without a pause (checked with events), ms.

    Raises:
        RuntimeError: The other load could not be kept running.
    """
    # Launches alternate: a stream takes about a thousand launches before the host has to wait.
    others = math.ceil(_MARGIN * alone_ms(load, 3) / alone_ms(other, 3))
    for _ in range(_TRIES):
        torch.cuda.synchronize()
        begun, ended = event(), event()
        with torch.cuda.stream(other.stream):
            other.launch()
            begun.record()
        load.stream.wait_event(begun)
        marks = [(event(), event()) for _ in range(repeats)]
        for start, end in marks:
            with torch.cuda.stream(other.stream):
                for _ in range(others):
                    other.launch()
            with torch.cuda.stream(load.stream):
                start.record()
                load.launch()
                end.record()
        with torch.cuda.stream(other.stream):
            for _ in range(others):
                other.launch()
            ended.record()
        torch.cuda.synchronize()
        if marks[-1][1].elapsed_time(ended) > 0:
            return Timing.of([start.elapsed_time(end) for start, end in marks]).median
        others *= 2
    raise RuntimeError(f"{others // 2} pieces beside each one were over too soon, {_TRIES} times")


def together_ms(loads: Sequence[Load], count: int) -> float:
    """Time until each load has done `count` pieces, ms. Loads on one stream alternate."""
    main = torch.cuda.current_stream()
    torch.cuda.synchronize()
    start, end = event(), event()
    start.record()
    for load in loads:
        load.stream.wait_event(start)
    for _ in range(count):
        for load in loads:
            with torch.cuda.stream(load.stream):
                load.launch()
    for load in loads:
        main.wait_stream(load.stream)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def new_stream() -> torch.cuda.Stream:
    """A plain stream on the whole device."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def event() -> torch.cuda.Event:
    """An event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture_on(stream: torch.cuda.Stream, launch: Launch) -> torch.cuda.CUDAGraph:
    """Runs one piece of work on a stream, then captures it there as a graph."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph
