"""One simulated worker: the real engine on a simulated runner, driven like a real worker's engine thread.

    idle ──command──▶ pass: commands, one step ──end of the step──▶ outputs, attempts again
      ▲                 ▲                                              │ commands or work
      └─ no more work ──┼──────────────────────────────────────────────┤
                        └──────────────────────────────────────────────┘

Commands that arrive during a step wait for its end, as on a real worker (worker/async_engine.py).

While there are only decodes, on the whole device or beside a prompt on the prefill lane, the steps up to the next load
report are fast-forwarded: made together at their end. A command that arrives earlier ends them with the step that runs
then. The result is the same, except that the router hears of cache changes in steps on the whole device only after the
last step, or the last one in which no stream ends.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel, Work
from cpd.rpc import cpd_pb2 as pb
from engine.batch import Batch
from engine.engine import Engine
from engine.scheduling.plan import Plan
from engine.scheduling.sequence import SequenceTable
from engine.types import CacheEvent, StepOutput
from sim.cluster.work import decodes_s, prompts_s
from sim.device.fast_forward import FastForward, next_work, possible_steps
from sim.device.pace import Pace
from sim.device.runner import SimulatedRunner, VirtualTime, build_outline, chooser
from sim.events import Events
from worker.load_report import INTERVAL_S, load_from_stats

Command = Callable[[Engine], object]
Run = Callable[[StepOutput, list[float]], None]
"""Takes the outputs of several steps, and the end of each step."""

Attempt = Callable[[Engine], bool]
"""Returns True if it succeeded; otherwise it is repeated after the next pass."""

Role = Literal["prefill", "combined"]

VOCAB_SIZE = 150_000


class SimWorker:
    """A worker. It serves requests of either role; its role only says which ones it gets.

    Args:
        role: prefill or combined, at first.
        truth: Gives step times.
        pace: How much longer steps take.
        model: Gives the worker's and the router's predictions.
        colocate: How prompts are computed beside decodes.
        token_budget: Most tokens of a step on the whole device; 0: by the model.
        itl_ms: Target gap between tokens.

    Attributes:
        role: prefill or combined. Requests that it has when the role changes end where they are.
        engine: Its engine; only commands may change it.
        model, colocate, num_pages, token_budget, decode_shares: As in its Hello to routers.
        on_begin: Called at the beginning of a step with the output that it will have.
        on_output: Called at the end of a step with its output.
        on_run: Called at the end of several fast-forwarded steps with their outputs.
        on_events: Called at the end of a pass with changes of the cache.
        on_load: Called with a load report, as often as a real worker sends one.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        events: Events,
        truth: PerfModel,
        pace: Pace,
        model: PerfModel,
        *,
        colocate: Mode,
        token_budget: int,
        itl_ms: float,
        num_pages: int,
        max_model_len: int,
        max_num_seqs: int,
        max_queue_tokens: int,
    ) -> None:
        self.id = worker_id
        self.role: Role = role
        self.truth = truth
        self.model = model
        self.colocate = colocate
        self.num_pages = num_pages
        self._events = events
        self._clock = VirtualTime()
        self._choose = chooser(VOCAB_SIZE)
        self._runner = runner = SimulatedRunner(num_pages, truth, self._clock, VOCAB_SIZE, pace)
        splits = [split.shares for split in runner.splits]
        colocation = Colocation(model, token_budget=token_budget, mode=colocate, splits=splits, itl_ms=itl_ms)
        self.token_budget = token_budget
        self.decode_shares = [split.decode for split in colocation.splits]
        self.engine = Engine(
            runner,
            max_model_len=max_model_len,
            colocation=colocation,
            max_num_seqs=max_num_seqs,
            max_queue_tokens=max_queue_tokens,
            build=self._build,
        )
        self.on_begin: Callable[[StepOutput], None] = lambda output: None
        self.on_output: Callable[[StepOutput], None] = lambda output: None
        self.on_run: Run = lambda output, ends_s: None
        self.on_events: Callable[[list[CacheEvent]], None] = lambda events: None
        self.on_load: Callable[[pb.Load], None] = lambda load: None
        self._commands: list[Command] = []
        self._attempts: list[Attempt] = []
        self._passing = False
        self._run: FastForward | None = None  # steps being fast-forwarded
        self._starts_s = 0.0
        self._ends_s: list[float] = []  # of each step
        self._chunk_ends_s: list[float | None] = []  # the prefill lane's, as of each step's end
        self._runs = 0
        self._idle = True
        self._reported_s = -INTERVAL_S
        self._prompts = self._decodes = Work()  # work of all steps with prompts, and of pure decode steps

    @property
    def device_s(self) -> float:
        """Device time of all work begun so far (see `sim/cluster/work.py`)."""
        return prompts_s(self.truth, self._prompts) + decodes_s(self.truth, self._decodes)

    def do(self, command: Command) -> None:
        """Runs `command` between two steps, as soon as possible."""
        self._commands.append(command)
        self._wake()

    def attempt(self, attempt: Attempt) -> None:
        """Makes an attempt now, and again after each pass until it succeeds."""

        def first(engine: Engine) -> None:
            if not attempt(engine):
                self._attempts.append(attempt)

        self.do(first)

    def _build(self, plan: Plan, table: SequenceTable) -> Batch:
        work = plan.work
        if work.is_decode:
            self._decodes += work
        else:
            self._prompts += work
        return build_outline(plan, table)

    def _wake(self) -> None:
        if not self._passing:
            self._passing = True
            self._events.at(self._events.now, self._pass)
        elif self._ends_s:
            self._run_until(bisect_left(self._ends_s, self._events.now) + 1)

    def _pass(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command(self.engine)
        if self._begin_run():
            return
        output = None
        self._clock.time_s = self._events.now
        if self.engine.has_work:
            output = self.engine.step(self._events.now)
            self.on_begin(output)
        self._events.at(self._clock.time_s, self._end_pass, output)

    def _end_pass(self, output: StepOutput | None) -> None:
        if output is not None:
            self.on_output(output)
        self._finish_pass()

    def _begin_run(self) -> bool:
        """Fast-forwards several steps, if the engine only decodes."""
        steps = 0 if self._attempts else possible_steps(self.engine)
        if not steps:
            return False
        if self._commands:  # they were made by the commands just run, and wait for the next step's end
            steps = 1
        now = self._clock.time_s = self._events.now
        due_s = now if self._idle else self._reported_s + INTERVAL_S
        ends_s: list[float] = []
        chunk_ends_s: list[float | None] = []
        share = self.engine.in_flight.main_lane.share
        for end_s, chunk_end_s in self._runner.decode_ends(next_work(self.engine), share):
            if chunk_end_s is not None and chunk_end_s <= end_s:  # its results are collected at this step's end
                break
            ends_s.append(end_s)
            chunk_ends_s.append(chunk_end_s)
            if len(ends_s) == steps or end_s >= due_s:
                break
        if not ends_s:
            return False
        self._starts_s, self._ends_s, self._chunk_ends_s = now, ends_s, chunk_ends_s
        self._run = FastForward(self.engine, len(ends_s), self._choose)
        if chunk_ends_s[0] is not None:
            self._reach_at(1)  # reports what the commands before it changed
        else:  # sequences may end with the last step: the others are reported before
            self._reach_at(steps - 1 if len(ends_s) == steps > 1 else None)
        return True

    def _run_until(self, steps: int) -> None:
        """Limits the fast-forward to this many steps, because of a new command."""
        if steps < len(self._ends_s):
            del self._ends_s[steps:]
            self._runs += 1
            self._reach_at(None)

    def _reach_at(self, steps: int | None) -> None:
        """Schedules the moment at which this many steps have ended; None: all."""
        steps = len(self._ends_s) if steps is None else steps
        self._events.at(self._ends_s[steps - 1], self._reach, self._runs, steps)

    def _reach(self, number: int, steps: int) -> None:
        if number != self._runs:
            return
        assert self._run is not None
        if steps < len(self._ends_s):
            self._run.advance(steps)
            self._send_cache_events()
            self._reach_at(self._run.next_change() if self._chunk_ends_s[0] is not None else None)
            return
        run, ends_s = self._run, self._ends_s
        self._run, self._ends_s = None, []
        self._runs += 1
        self._clock.time_s = ends_s[-1]
        self._runner.fast_forwarded(self._chunk_ends_s[steps - 1])
        seqs = steps * run.work.seqs
        self._decodes += Work.decode(seqs, steps * run.work.context + seqs * (steps - 1) // 2)
        ms = [1e3 * (end_s - start_s) for start_s, end_s in pairwise([self._starts_s, *ends_s])]
        self.on_run(run.end(ms), ends_s)
        self._finish_pass()

    def _finish_pass(self) -> None:
        if self._attempts:
            self._attempts = [attempt for attempt in self._attempts if not attempt(self.engine)]
        self._send_cache_events()
        self._report_load()
        if self._commands or self.engine.has_work:
            self._pass()
            return
        self._passing = False
        if (alarm_s := self._clock.alarm_s) is not None:
            self._events.at(alarm_s, self._wake)

    def _send_cache_events(self) -> None:
        if events := self.engine.take_cache_events():
            self.on_events(events)

    def _report_load(self) -> None:
        """Sends a load report, at bounded intervals and when work begins or ends."""
        idle = not self.engine.has_work
        if idle == self._idle and self._events.now < self._reported_s + INTERVAL_S:
            return
        self._idle, self._reported_s = idle, self._events.now
        self.on_load(load_from_stats(self.engine.stats(self._events.now), pb.STATE_READY))
