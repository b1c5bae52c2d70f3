"""Runs the bursts of a study. Each burst has these phases:

    drain     wait until the server is as fast as before the study
    idle      send equal prompts to the idle server: their cost without decoding
    start     start the decode streams, and measure a window of steady decoding (`before`)
    burst     send the prompts at one moment, each for one token (`during`)
    recover   wait for a window within 5 % of `before`
    stop      stop the decode streams

Every burst has new decode streams, so that their contexts have equal lengths.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from bench.client.client import Client
from bench.errors import BenchError
from bench.interference.decodes import Decodes
from bench.interference.gaps import gaps_ms, is_steady, mean_gap_ms, timeline
from bench.interference.result import Burst, Cell, Window
from bench.interference.settings import InterferenceSettings
from bench.load.clock import Clock
from bench.load.loop_lag import LoopLag, percentile_ms
from bench.load.plan import Health
from bench.record import Failure, Record
from bench.tokens import Texts
from bench.workloads.base import Message

POLL_S = 0.02
PROBES = 5
PROBE_TOKENS = 16
DRAINED_RATIO, DRAINED_SLACK_S = 1.5, 0.002
STEADY_RATIO = 1.1
RECOVERED_RATIO = 1.05
TIMELINE_POINTS = 120


class StudyError(BenchError):
    """Bursts of any size can't be measured."""


class Study:
    """Measures the bursts of a grid one after the other.

    Args:
        client: Sends all requests.
        texts: Makes prompts.
        settings: The grid and its times.
        seed: Seed of all prompts.
        say: Called with a description of the current phase.

    Attributes:
        cells: Results so far, without the kinds of burst that were not reached.
    """

    def __init__(
        self, client: Client, texts: Texts, settings: InterferenceSettings, seed: int, say: Callable[[str], None]
    ) -> None:
        self.cells: list[Cell] = []
        self._client = client
        self._texts = texts
        self._settings = settings
        self._rng = np.random.default_rng(np.random.SeedSequence([seed]))
        self._say = say
        self._idle_s = 0.0
        self._lags_s: list[float] = []
        self._cpu_share = 0.0
        self._machine_idle = 1.0

    @property
    def health(self) -> Health:
        """Health of the client while decode streams ran, over all bursts."""
        return Health(
            processes=1,
            cpu_share=self._cpu_share,
            loop_lag_ms_p50=percentile_ms(self._lags_s, 50),
            loop_lag_ms_p99=percentile_ms(self._lags_s, 99),
            machine_share=self._cpu_share / (os.cpu_count() or 1),
            machine_idle=self._machine_idle,
        )

    async def run(self, done: Callable[[Cell], None]) -> None:
        """Measures all bursts. Calls `done` with each kind of burst when it is complete.

        Raises:
            StudyError: The server no longer answers, or its decode streams can't be used.
        """
        self._say("latency of the idle server")
        self._idle_s = median([await self._probe() for _ in range(PROBES)])
        grid = self._settings.grid()
        began_s, measured, total = time.perf_counter(), 0, len(grid) * self._settings.repeats
        for count, length in grid:
            cell = Cell(prefills=count, prefill_len=length)
            self.cells.append(cell)
            try:
                for number in range(1, self._settings.repeats + 1):
                    left = _left(time.perf_counter() - began_s, measured, total)
                    self._say(f"{cell.name} tokens, burst {number} of {self._settings.repeats}{left}")
                    cell.bursts.append(await self._burst(count, length))
                    measured += 1
            except StudyError:
                raise
            except BenchError as error:
                cell.error = str(error)
            done(cell)

    async def _burst(self, count: int, length: int) -> Burst:
        settings = self._settings
        drained = await self._drain()
        idle = await self._inject(self._prompts(count, length), length)
        prompts = self._prompts(count, length)
        decodes = Decodes(self._client, settings.decodes, self._prompt, settings.decode_len, settings.decode_output_len)
        with Clock() as clock:
            loop_lag = LoopLag(clock)
            async with decodes:
                begin_s, steady = await self._steady(decodes)
                before = _window(decodes, begin_s, begin_s + settings.window_s)
                alarms = len(loop_lag.lags_s)
                records = await self._inject(prompts, length)
                late_s = max(loop_lag.lags_s[alarms:], default=0.0)
                burst_s, end_s = records[0].due_s, max(_first_s(record) for record in records if _served(record))
                recovery_s, after_ms = await self._recovery(decodes, end_s, before.mean_ms)
                over_s = time.perf_counter()
            self._lags_s += loop_lag.lags_s
            self._cpu_share = max(self._cpu_share, loop_lag.cpu_share)
            self._machine_idle = min(self._machine_idle, loop_lag.machine_idle)
        return Burst(
            before=before,
            during=_window(decodes, burst_s, end_s),
            after_ms=after_ms,
            burst_ms=(end_s - burst_s) * 1e3,
            recovery_s=recovery_s,
            ttft_ms=_ttft_ms(records),
            idle_ttft_ms=_ttft_ms(idle),
            prompt_tokens=sum(record.prompt_tokens or record.input_len for record in records),
            failed=Counter(record.error for record in records if not _served(record)),
            routes=Counter(record.route for record in records if record.route),
            client_late_ms=late_s * 1e3,
            restarts=decodes.restarts(burst_s, over_s),
            steady=steady,
            drained=drained,
            timeline=timeline(
                decodes.stamps, begin_s, min(over_s, end_s + 2 * settings.window_s), burst_s, TIMELINE_POINTS
            ),
        )

    async def _drain(self) -> bool:
        """Waits until a short prompt is answered as fast as before the study. Returns False after a time-out."""
        deadline_s = time.perf_counter() + self._settings.settle_s
        while time.perf_counter() < deadline_s:
            if await self._probe() <= self._idle_s * DRAINED_RATIO + DRAINED_SLACK_S:
                return True
        return False

    async def _probe(self) -> float:
        """Time to first token of a short prompt, in seconds."""
        try:
            (record,) = await self._inject(self._prompts(1, PROBE_TOKENS), PROBE_TOKENS)
        except BenchError as error:
            raise StudyError(f"the server doesn't answer a short prompt: {error}") from error
        return _first_s(record) - record.due_s

    async def _inject(self, prompts: Sequence[str], length: int) -> Sequence[Record]:
        """Sends prompts at one moment, each for one token. Returns when all are answered."""
        now_s = time.perf_counter()
        records = [Record(number, 0, length, 1, now_s, now_s) for number in range(len(prompts))]
        requests = zip(records, prompts, strict=True)
        await asyncio.gather(*(self._client.stream(record, [Message("user", text)]) for record, text in requests))
        if not any(_served(record) for record in records):
            raise BenchError(f"no injected prompt was served: {records[0].error} {records[0].detail}".strip())
        return records

    async def _steady(self, decodes: Decodes) -> tuple[float, bool]:
        """Waits until all streams have decoded steadily for a window. Returns its start, and whether it is steady."""
        window_s = self._settings.window_s
        deadline_s = time.perf_counter() + self._settings.timeout_s
        begun = met = False
        while True:
            try:
                begin_s = decodes.seen_until_s() - window_s
                together = decodes.decoding_since_s() <= begin_s
            except BenchError as error:
                raise StudyError(str(error)) from error
            late = time.perf_counter() >= deadline_s
            if together:
                met = True
                steady = is_steady(decodes.stamps, begin_s, begin_s + window_s, STEADY_RATIO)
                if steady or late:
                    return begin_s, steady
            elif late and met:  # a stream is being restarted
                met = False
                deadline_s += window_s + self._settings.settle_s
            elif late:
                raise StudyError(
                    "the decode streams don't decode together for --window-s: they end too early (use a larger "
                    "--decode-output-len, or a server that supports ignore_eos) or begin too late (use fewer --decodes)"
                )
            elif decodes.begun and not begun:
                begun = True
                deadline_s = time.perf_counter() + window_s + self._settings.settle_s
            await asyncio.sleep(POLL_S)

    async def _recovery(self, decodes: Decodes, end_s: float, before_ms: float) -> tuple[float | None, float | None]:
        """Waits for the first window after `end_s` that is like before the burst.

        Skips windows in which a stream is restarted, because its prompt disturbs the others.

        Returns:
            Seconds until the window begins (None if decoding did not recover), and the mean gap of the last window.
        """
        window_s = self._settings.window_s
        deadline_s = time.perf_counter() + window_s + self._settings.settle_s
        begin_s, after_ms = end_s, None
        while time.perf_counter() < deadline_s:
            if decodes.seen_until_s() < begin_s + window_s:
                await asyncio.sleep(POLL_S)
                continue
            since_s = decodes.decoding_since_s()
            if since_s > begin_s:
                begin_s = since_s
                continue
            after_ms = mean_gap_ms(decodes.stamps, begin_s, begin_s + window_s)
            if after_ms is not None and after_ms <= RECOVERED_RATIO * before_ms:
                return begin_s - end_s, after_ms
            begin_s += window_s / 10
        return None, after_ms

    def _prompts(self, count: int, length: int) -> Sequence[str]:
        return [self._prompt(length) for _ in range(count)]

    def _prompt(self, length: int) -> str:
        return self._texts.text(self._rng, max(1, length - self._texts.overhead))


def _left(elapsed_s: float, measured: int, total: int) -> str:
    """How far the study is, and how long the rest will take if it goes on like this."""
    if not measured:
        return f" (1 of {total} in all)"
    left_s = elapsed_s / measured * (total - measured)
    about = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
    return f" ({measured + 1} of {total} in all, about {about} left)"


def _window(decodes: Decodes, start_s: float, end_s: float) -> Window:
    mean_ms = mean_gap_ms(decodes.stamps, start_s, end_s)
    if mean_ms is None:
        raise BenchError("the decode streams made no progress")
    gaps = gaps_ms(decodes.stamps, start_s, end_s)
    return Window(mean_ms=mean_ms, p99_ms=float(np.percentile(gaps, 99)), max_ms=float(gaps.max()))


def _served(record: Record) -> bool:
    """True if the prompt was computed. A single token may have no text."""
    return record.error in ("", Failure.EMPTY)


def _first_s(record: Record) -> float:
    return record.content_s[0] if record.content_s else record.ended_s


def _ttft_ms(records: Sequence[Record]) -> list[float]:
    return [(_first_s(record) - record.due_s) * 1e3 for record in records if _served(record)]
