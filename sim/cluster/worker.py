"""One simulated worker: the real engine on a simulated runner, and passes as the engine thread makes them.

    idle ──command──▶ pass: commands, one step ──the step's end──▶ its results are seen, waiting calls are tried again
      ▲                 ▲                                              │ commands or work
      └─ no more work ──┼──────────────────────────────────────────────┤
                        └──────────────────────────────────────────────┘

Commands that come while a step runs wait for its end, as they do on a real worker (worker/engine_thread.py).

While streams only decode, on the whole device or beside a prompt on the prefill lane, the steps up to the next load
report are made at once, at their end; a command that comes before it ends them with the step that runs then. Nothing is
different from one step after the other, but that what steps on the whole device put into the cache or evict is told to
the router at the end of the last one, or of the last one in which no stream ends.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel, Work
from cpd.rpc import cpd_pb2 as pb
from engine.batch import Batch
from engine.engine import Engine
from engine.scheduling.plan import Plan
from engine.scheduling.sequence import SequenceTable
from engine.types import CacheEvent, StepOutput
from sim.cluster.events import Events
from sim.cluster.work import decodes_s, prompts_s
from sim.device.fast_forward import FastForward, next_work
from sim.device.runner import SimulatedRunner, VirtualTime, chooser, outline
from worker.load import INTERVAL_S, load_from_stats

Command = Callable[[Engine], object]
Run = Callable[[StepOutput, list[float]], None]
"""Takes the tokens of several steps, and when each of these ended."""

Attempt = Callable[[Engine], bool]
"""Returns whether it succeeded; otherwise it is made again after the next pass."""

VOCAB_SIZE = 150_000


class SimWorker:
    """A worker of either role.

    Args:
        model: How long its steps take, and what it predicts with.
        colocate: Where prompts go while it decodes.
        token_budget: Of a step on the whole device; 0: as follows from the model.
        itl_ms: Target for the gaps of its streams.

    Attributes:
        id: Its name.
        role: prefill or combined.
        engine: Its engine. Change it in commands only.
        model, colocate, num_pages, token_budget, decode_shares: As its Hello tells routers.
        on_begin: Called with what a step is going to bring, at its beginning.
        on_output: Called with what a step brought, at its end.
        on_run: Called with what several steps of decodes brought, at the last one's end.
        on_events: Called with what changed in the cache, at a pass's end.
        on_load: Called with a load report, as often as a real worker sends one.
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        events: Events,
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
        self.role = role
        self.model = model
        self.colocate = colocate
        self.num_pages = num_pages
        self._events = events
        self._clock = VirtualTime()
        self._choose = chooser(VOCAB_SIZE)
        self._runner = runner = SimulatedRunner(num_pages, model, self._clock, VOCAB_SIZE)
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
        self._run: FastForward | None = None  # steps that are made at once, while they run
        self._starts_s = 0.0
        self._ends_s: list[float] = []  # of each step
        self._aside_ends_s: list[float | None] = []  # of what the prefill lane computes, as of each step's end
        self._runs = 0
        self._idle = True
        self._reported_s = -INTERVAL_S
        self._prompts = self._decodes = Work()  # of all steps with prompts, and with decodes alone

    @property
    def device_s(self) -> float:
        """Device time of all that it has begun to compute (see `sim/cluster/work.py`)."""
        return prompts_s(self.model, self._prompts) + decodes_s(self.model, self._decodes)

    def do(self, command: Command) -> None:
        """Runs `command` between two steps, as soon as possible."""
        self._commands.append(command)
        self._wake()

    def attempt(self, attempt: Attempt) -> None:
        """Makes an attempt now, and after every pass until it succeeds."""

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
        return outline(plan, table)

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
        self._passed()

    def _begin_run(self) -> bool:
        """Starts several steps at once, if the engine has nothing to do but decodes."""
        steps = 0 if self._attempts else self.engine.uneventful_steps
        if not steps:
            return False
        if self._commands:  # they came from those that have just been run, and wait for the next step's end
            steps = 1
        now = self._clock.time_s = self._events.now
        due_s = now if self._idle else self._reported_s + INTERVAL_S
        ends_s: list[float] = []
        aside_ends_s: list[float | None] = []
        for end_s, aside_end_s in self._runner.ahead(next_work(self.engine), self.engine.decode_share):
            if aside_end_s is not None and aside_end_s <= end_s:  # its results are seen at this step's end
                break
            ends_s.append(end_s)
            aside_ends_s.append(aside_end_s)
            if len(ends_s) == steps or end_s >= due_s:
                break
        if not ends_s:
            return False
        self._starts_s, self._ends_s, self._aside_ends_s = now, ends_s, aside_ends_s
        self._run = FastForward(self.engine, len(ends_s), self._choose)
        if aside_ends_s[0] is not None:
            self._reach_at(1)  # what the commands before it changed is told then
        else:  # sequences may end with the last one: the router hears of those before
            self._reach_at(steps - 1 if len(ends_s) == steps > 1 else None)
        return True

    def _run_until(self, steps: int) -> None:
        """Somebody wants something: no more of the steps than these are made."""
        if steps < len(self._ends_s):
            del self._ends_s[steps:]
            self._runs += 1
            self._reach_at(None)

    def _reach_at(self, steps: int | None) -> None:
        """Waits for the end of a step: so many have been made then; None: all."""
        steps = len(self._ends_s) if steps is None else steps
        self._events.at(self._ends_s[steps - 1], self._reach, self._runs, steps)

    def _reach(self, number: int, steps: int) -> None:
        if number != self._runs:
            return
        assert self._run is not None
        if steps < len(self._ends_s):
            self._run.make(steps)
            self._tell_cache_events()
            self._reach_at(self._run.next_change() if self._aside_ends_s[0] is not None else None)
            return
        run, ends_s = self._run, self._ends_s
        self._run, self._ends_s = None, []
        self._runs += 1
        self._clock.time_s = ends_s[-1]
        self._runner.jump(self._aside_ends_s[steps - 1])
        seqs = steps * run.work.seqs
        self._decodes += Work.decode(seqs, steps * run.work.context + seqs * (steps - 1) // 2)
        ms = [1e3 * (end_s - start_s) for start_s, end_s in pairwise([self._starts_s, *ends_s])]
        self.on_run(run.end(ms), ends_s)
        self._passed()

    def _passed(self) -> None:
        if self._attempts:
            self._attempts = [attempt for attempt in self._attempts if not attempt(self.engine)]
        self._tell_cache_events()
        self._report_load()
        if self._commands or self.engine.has_work:
            self._pass()
            return
        self._passing = False
        if (alarm_s := self._clock.alarm_s) is not None:
            self._events.at(alarm_s, self._wake)

    def _tell_cache_events(self) -> None:
        if events := self.engine.take_cache_events():
            self.on_events(events)

    def _report_load(self) -> None:
        """At bounded intervals, and when work begins or ends."""
        idle = not self.engine.has_work
        if idle == self._idle and self._events.now < self._reported_s + INTERVAL_S:
            return
        self._idle, self._reported_s = idle, self._events.now
        self.on_load(load_from_stats(self.engine.stats(self._events.now), pb.STATE_READY))
