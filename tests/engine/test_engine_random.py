"""The engine under random orders of events: the tokens are right and no page is lost."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpd.common.blocks import Tier
from cpd.performance.colocation import Mode
from engine.types import Computed, Request, Reservation
from tests.engine.fakes import (
    GARBAGE,
    Served,
    arrive,
    arrive_first_blocks,
    assert_all_released,
    cached,
    drain,
    expected,
    follow,
    make_engine,
    make_request,
    prompt,
    states_of,
)


class EngineMachine(RuleBasedStateMachine):
    """Few pages, short prompts with shared prefixes, and everything that can happen to a request."""

    modes: Sequence[Mode] = ("mixed",)
    num_pages = st.integers(6, 14)
    max_num_seqs: Sequence[int] = (1, 2, 5)
    max_tokens: Sequence[int] = (1, 4, 18, 40)
    tails: Sequence[int] = (1, 5, 16, 33)

    @initialize(data=st.data(), budget=st.sampled_from([5, 16, 40, 100]))
    def start(self, data: st.DataObject, budget: int) -> None:
        self.engine, self.runner = make_engine(
            data.draw(self.num_pages),
            max_model_len=150,
            token_budget=budget,
            max_num_seqs=data.draw(st.sampled_from(self.max_num_seqs)),
            colocate=data.draw(st.sampled_from(self.modes)),
            overlaps=data.draw(st.booleans()),
            host_pages=data.draw(st.sampled_from([0, 1, 3, 9, 30])),
        )
        self.host = self.runner.host
        if self.host is not None:
            self.host.by_hand = data.draw(st.booleans())
        self.lane = self.runner.prefill_lane
        self.served = Served()
        self.names = iter(range(1_000_000))
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.landings: dict[str, Reservation] = {}
        self.quarantined: list[Reservation] = []
        self.pinned: list[tuple[Computed, list[int]]] = []
        self.of_first_blocks: set[str] = set()
        self.known: dict[bytes, Tier] = {}

    def new_request(self, data: st.DataObject, **options: bool) -> Request:
        """Prompts of a family share their first tokens, up to where the second part begins."""
        shared = prompt(data.draw(st.sampled_from([64, 50, 32, 16, 0])), data.draw(st.sampled_from([0, 0, 1])))
        tail = prompt(data.draw(st.sampled_from(self.tails)), data.draw(st.integers(3, 4)))
        token_ids = [*shared, *tail]
        assume(len(token_ids) < self.engine.max_model_len)
        request = make_request(
            str(next(self.names)),
            token_ids,
            n=data.draw(st.sampled_from([1, 1, 1, 2, 4])),
            max_tokens=data.draw(st.sampled_from(self.max_tokens)),
            stop=data.draw(st.sampled_from([(), (3, 17)])),
            seed=data.draw(st.integers(0, 2)),
            **options,
        )
        if request.n == 1 and data.draw(st.booleans()):
            done = expected(request, 0, self.engine.max_model_len).token_ids
            done = done[: data.draw(st.integers(0, len(done) - 1))]
            request = make_request(
                request.id,
                token_ids + done,
                prompt_len=len(token_ids),
                max_tokens=request.params.max_tokens,
                stop=sorted(request.params.stop_token_ids),
                seed=request.params.seed,
                **options,
            )
        request = replace(
            request,
            tenant=data.draw(st.sampled_from(["", "other"])),
            priority=data.draw(st.sampled_from([0, 0, 1])),
            received=self.now,
            deadline=self.now + data.draw(st.sampled_from([1.0, 3.0, inf])),
        )
        self.requests[request.id] = request
        return request

    def take_step(self) -> None:
        quarantine = self.engine.stats().pages.quarantined
        step = self.engine.step(self.now)
        self.served.take(step)
        for computed in step.computed:
            if len(computed.pages) % 2:  # any rule will do
                self.engine.pin(computed.pages)
                self.pinned.append((computed, self.content(computed)))
        if step.failed:
            assert quarantine
            self.aborted.update((name, choice) for name, _ in step.failed for choice in range(4))

    @rule(data=st.data(), prefill_only=st.sampled_from([False, False, True]))
    def add(self, data: st.DataObject, prefill_only: bool) -> None:
        self.engine.add(self.new_request(data, prefill_only=prefill_only))

    @precondition(lambda self: self.runner.full.waiting + self.runner.decode_lane.waiting)
    @rule(data=st.data())
    def device_computes(self, data: st.DataObject) -> None:
        """Lets lanes compute launched steps, in order."""
        lane = self.runner.full if self.runner.full.waiting else self.runner.decode_lane
        for _ in range(data.draw(st.integers(1, lane.waiting))):
            lane.compute_next()

    @precondition(lambda self: self.copying)
    @rule()
    def blocks_are_loaded(self) -> None:
        assert self.host is not None
        self.host.finish()
        assert self.engine.has_work

    @precondition(lambda self: self.host is not None)
    @rule(data=st.data())
    def host_memory_is_damaged(self, data: st.DataObject) -> None:
        assert self.host is not None
        self.host.damaged.add(data.draw(st.integers(0, self.host.num_slots - 1)))

    @rule()
    def time_passes(self) -> None:
        self.now += 2

    @precondition(lambda self: self.engine.has_work)
    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take_step()
            self.engine.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        choices = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 3), unique=True)))
        if name not in self.landings:
            self.engine.abort(name, choices)
            self.aborted.update((name, choice) for choice in (range(4) if choices is None else choices))

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        request = self.new_request(data)
        reservation = self.engine.landings.reserve(request)
        if reservation is None:
            del self.requests[request.id]
        else:
            self.landings[request.id] = reservation

    @rule(data=st.data())
    def reserve_first_blocks(self, data: st.DataObject) -> None:
        request = self.new_request(data)
        blocks = len(request.block_hashes)
        reservation = self.engine.landings.reserve(request, data.draw(st.integers(1, blocks))) if blocks else None
        if reservation is None:
            del self.requests[request.id]
        else:
            self.landings[request.id] = reservation
            self.of_first_blocks.add(request.id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pin_cached(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if data.draw(st.booleans()):
            self.engine.load(request.block_hashes)
        if pages := self.engine.pin_cached(request.block_hashes):
            computed = Computed(request.id, 16 * len(pages), pages)
            assert self.content(computed) == states_of(request.token_ids)[: computed.num_tokens]
            self.pinned.append((computed, self.content(computed)))

    @precondition(lambda self: self.landings or self.quarantined)
    @rule()
    def late_writes(self) -> None:
        for reservation in (*self.landings.values(), *self.quarantined):
            for page in reservation.pages:
                self.runner.pages[page] = [GARBAGE] * 16

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), how=st.sampled_from(["arrives", "arrives", "cancelled", "quarantined"]))
    def end_landing(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.landings)))
        reservation = self.landings.pop(name)
        if how == "arrives" and name in self.of_first_blocks:
            arrive_first_blocks(self.engine, self.runner, reservation, self.requests[name])
            self.engine.add(self.requests[name])
        elif how == "arrives":
            arrive(self.engine, self.runner, reservation, self.requests[name], self.served)
        else:
            self.engine.landings.cancel(reservation, quarantine=how == "quarantined")
            if how == "quarantined":
                self.quarantined.append(reservation)
            del self.requests[name]

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.engine.landings.end_quarantine(self.quarantined.pop())

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        computed, content = self.pinned.pop()
        assert self.content(computed) == content
        self.engine.unpin(computed.pages)

    @property
    def copying(self) -> bool:
        return self.host is not None and self.host.copying

    def content(self, computed: Computed) -> list[int]:
        return [slot for page in computed.pages for slot in self.runner.pages[page]][: computed.num_tokens]

    @rule(drains=st.booleans())
    def is_paused(self, drains: bool) -> None:
        if drains:
            self.engine.hold_new()
        else:
            self.engine.pause()

    @precondition(lambda self: self.engine.paused)
    @rule()
    def gives_its_memory_away(self) -> None:
        if self.engine.park_all():
            assert self.engine.stats().pages.free == self.runner.num_pages
            for page in range(self.runner.num_pages):
                self.runner.pages[page] = [GARBAGE] * 16

    @precondition(lambda self: not self.engine.starts_new)
    @rule()
    def goes_on(self) -> None:
        self.engine.go_on(self.now)

    @rule()
    def cache_events(self) -> None:
        follow(self.known, self.engine.take_cache_events())
        assert self.known == cached(self.engine)

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.queued_tokens <= sum(len(request.token_ids) for request in self.requests.values())
        assert (stats.prefill_ms > 0) == (stats.waiting_tokens > 0)
        if stats.running + stats.waiting and not self.engine.has_work and self.engine.starts_new:
            assert self.landings or self.pinned or self.lane.running or self.copying, (
                "has no work, and waits for nothing"
            )

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for reservation in self.landings.values():
            self.engine.landings.cancel(reservation, quarantine=False)
        while self.quarantined:
            self.end_quarantine()
        self.engine.go_on(self.now)
        if self.host is not None:
            self.host.by_hand = False
        for _ in range(10_000):
            if not (self.pinned or self.engine.has_work or self.lane.running or self.copying):
                break
            if self.host is not None and self.host.copying:
                self.host.finish()
            if self.lane.running:
                self.lane.finish()
            if self.engine.has_work:
                self.take_step()
            if self.pinned:
                self.unpin()
        assert_all_released(self.engine)
        for name, request in self.requests.items():
            if name not in self.landings:
                self.check(request)
        self.cache_events()
        self.check_what_is_cached()

    def check(self, request: Request) -> None:
        """Aborted choices may end early; what they emitted is right."""
        for choice in range(request.n):
            want, key = expected(request, choice, self.engine.max_model_len), (request.id, choice)
            got = self.served.token_ids.get(key, [])
            whole = want.token_ids[:1] if request.prefill_only else want.token_ids
            if key in self.aborted:
                assert got == whole[: len(got)]
            else:
                assert got == whole
                if not request.prefill_only:
                    assert self.served.finish[key] is want.finish

    def check_what_is_cached(self) -> None:
        """Serves every prompt once more, from the cache as it is now."""
        for request in self.requests.values():
            again = make_request("again", request.token_ids, seed=9, max_tokens=3)
            if len(again.token_ids) < self.engine.max_model_len:
                self.engine.add(again)
                served = drain(self.engine)
                assert served.token_ids["again", 0] == expected(again, 0, self.engine.max_model_len).token_ids


class LaneMachine(EngineMachine):
    """The same beside a prefill lane. Its chunks end at random times, and some prompts take several."""

    modes = ("lanes", "auto")
    num_pages = st.integers(8, 30)
    max_num_seqs = (2, 3, 5)
    max_tokens = (4, 18, 40)
    tails = (1, 5, 33, 80, 130)

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def one_step(self) -> None:
        self.step(1)

    @rule(data=st.data(), ended=st.booleans())
    def added_and_gets_going(self, data: st.DataObject, ended: bool) -> None:
        """A request that may be on the prefill lane when some of its choices are ended."""
        request = self.new_request(data)
        self.engine.add(request)
        self.step(2)
        if ended:
            choices = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 3), unique=True)))
            self.engine.abort(request.id, choices)
            self.aborted.update((request.id, choice) for choice in (range(4) if choices is None else choices))

    @precondition(lambda self: self.lane.running)
    @rule()
    def lane_is_done(self) -> None:
        self.lane.finish()
        assert self.engine.has_work


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
