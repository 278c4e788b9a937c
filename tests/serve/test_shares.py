"""Shares of the engine, counted in work: of training and sampling, and of clients."""

import asyncio
import socket
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dataproto.chunks import EncodedTextChunk
from dataproto_server.backend import Datum, LoraSpec, Pass, SampleRequest, Sampling, Snapshot
from dataproto_server.config import EngineOptions
from dataproto_server.engine_process import EngineProcess
from dataproto_server.front.fair_share import FairShare
from dataproto_server.ledger.records import Sampler
from helpers.examples import at_most
from helpers.fronts import Front, drive
from helpers.vector_backend import VectorBackend

TURN = 10
COSTS = st.lists(st.integers(0, 40), min_size=60, max_size=60)


@settings(max_examples=at_most(30), deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), COSTS, min_size=1))
def test_no_client_gets_more_than_another_by_more_than_a_turn_and_two_items(costs):
    """While all of them wait; and each gets its items in their order."""
    share, served = FairShare[tuple[str, int]](TURN), Counter()
    places = dict.fromkeys(costs, 0)
    for _ in range(20):
        waiting = {
            client: [((client, place), items[place]) for place in range(places[client], len(items))]
            for client, items in costs.items()
        }
        chosen = share.choose(waiting)
        assert chosen
        for client, place in chosen:
            assert place == places[client]
            places[client] += 1
            served[client] += costs[client][place]
        if any(places[client] == len(items) for client, items in costs.items()):
            break
        totals = [served[client] for client in costs]
        assert max(totals) - min(totals) <= TURN + 2 * 40


def test_credit_is_not_saved_up_while_nothing_waits():
    share = FairShare[str](TURN)
    for _ in range(9):
        assert share.choose({"ann": [("small", 1)], "ben": []}) == ["small"]
    assert share.choose({"ann": [(str(number), 6) for number in range(9)]}) == ["0"]
    assert share.choose({}) == []


# Training and sampling


class Counting(VectorBackend):
    """Its clock counts work: so much for each row of a pass, for each decoding step, and for each request that is taken in."""

    def __init__(self, row: float, step: float, entry: float = 0.0) -> None:
        super().__init__()
        self.row, self.step, self.entry, self.now = row, step, entry, 0.0
        self.events = ""

    def submit(self, request):
        self.now += self.entry
        self.events += "S" if self.entry else ""
        super().submit(request)

    def passes(self, passes, *, between=None):
        for number in range(len(passes[0].data)):
            if number:
                between()
            self.now += self.row
            self.events += "T"
        return super().passes(passes)

    def poll(self):
        self.now += self.step
        self.events += "D"
        return {}


@pytest.fixture
def engine_of(tmp_path):
    made = []

    def engine_of(backend):
        made.append(EngineProcess(backend, tmp_path / "socket", clock=lambda: backend.now))
        backend.create("m", "tiny/vector", LoraSpec(4))
        return made[-1]

    yield engine_of
    for each in made:
        each.listener.close()


def put(engine, method, **arguments):
    engine.calls.put((socket.socketpair()[0], {"id": None, "method": method, "arguments": arguments}))


def put_pass(engine, rows):
    put(engine, "passes", passes=[Pass("m", [Datum([EncodedTextChunk([1])], {})] * rows, "cross_entropy")])


def put_sample(engine):
    request = SampleRequest("r", Snapshot("tiny/vector"), [EncodedTextChunk([3])], 1, Sampling(4))
    put(engine, "submit", request=request)


@pytest.mark.parametrize(("row", "step", "events"), [(4, 1, "TDDDD" * 4), (1, 3, "TD" + "TTTD" * 4), (2, 2, "TD" * 9)])
def test_training_and_sampling_have_the_same_time(engine_of, row, step, events):
    backend = Counting(row, step)
    engine = engine_of(backend)
    put_sample(engine)
    for _ in range(40):
        put_pass(engine, 1)
    while len(backend.events) < len(events):
        engine.step()
    assert backend.events.startswith(events)


def test_samples_that_are_taken_in_take_of_their_share(engine_of):
    """Training does not wait for all of them; when none is left it has the other half beside decoding."""
    backend = Counting(2, 2, entry=2)
    engine = engine_of(backend)
    for _ in range(3):
        put_sample(engine)
    for _ in range(9):
        put_pass(engine, 1)
    while len(backend.events) < 10:
        engine.step()
    assert backend.events.startswith("STSTST" + "TDTD")


def test_samples_are_taken_in_between_the_parts_of_a_pass_by_their_share(engine_of):
    backend = Counting(2, 2, entry=2)
    engine = engine_of(backend)
    put_pass(engine, 6)
    compute = backend.passes
    backend.passes = lambda passes, **options: ([put_sample(engine) for _ in range(4)], compute(passes, **options))[1]
    engine.step()
    assert backend.events == "TSSTSTSTTDTD"


def test_samples_do_not_wait_for_the_whole_of_a_joint_pass(engine_of):
    backend = Counting(3, 1)
    engine = engine_of(backend)
    put_sample(engine)
    put_pass(engine, 3)
    engine.step()
    assert backend.events == "TDDDTDDDTD"


def test_samples_that_come_during_a_pass_are_taken_in_between_its_parts(engine_of):
    backend = Counting(3, 1)
    engine = engine_of(backend)
    put_pass(engine, 3)
    compute = backend.passes
    backend.passes = lambda passes, **options: (put_sample(engine), compute(passes, **options))[1]
    engine.step()
    assert backend.events == "TDDDTDDDTD"


def test_adapters_are_written_together_before_a_step_of_the_samples_of_some(engine_of):
    """A step for the samples of each would make the last client wait for all of them."""
    backend = Counting(3, 1)
    engine = engine_of(backend)

    def export(model_id, directory, **options):
        backend.now += 2
        backend.events += "E"

    backend.export = export
    put_sample(engine)
    for _ in range(4):
        put(engine, "export", model_id="m", directory=None)
    put_pass(engine, 1)
    engine.step()
    engine.step()
    assert backend.events.startswith("EEEED")


def test_training_alone_goes_on_without_decoding(engine_of):
    backend = Counting(3, 1)
    engine = engine_of(backend)
    for _ in range(3):
        put_pass(engine, 2)
        engine.step()
    assert backend.events == "T" * 6


def test_calls_of_a_front_process_that_has_gone_are_dropped(engine_of):
    backend = Counting(3, 1)
    engine = engine_of(backend)
    put_sample(engine)
    put_pass(engine, 2)
    put(engine, "reset")
    engine.step()
    assert backend.events == ""
    assert backend.flying == {}


# Clients


def test_a_client_with_large_passes_does_not_hold_up_another(tmp_path):
    """Passes of 40,000 tokens beside updates on single tokens: a turn is 16,384 tokens, so that three turns pay one pass."""

    async def work(front: Front):
        large, small = await front.new_run("large"), await front.new_run("small", session="t")
        front.backend.gate.clear()
        await front.submit(large, 1, 3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        requests = [await front.submit(large, seq, 3, tokens=40_000) for seq in (2, 3)]
        requests += [await front.submit(small, seq, None if seq % 2 == 0 else 5) for seq in range(1, 13)]
        front.backend.gate.set()
        for each in requests:
            await front.result(each)

    groups = drive(work, tmp_path).backend.groups
    alone, both = ["small"], ["large", "small"]
    assert groups == [["large"], alone, alone, both, alone, both, alone]


def test_runs_of_one_client_take_turns_by_their_age(tmp_path):
    async def work(front: Front):
        one, two = await front.new_run("one"), await front.new_run("two")
        front.backend.gate.clear()
        await front.submit(one, 1, 3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)
        for seq in (1, 2):
            await front.submit(two, seq, 3, tokens=16_384)
        requests = [await front.submit(one, seq, 3, tokens=16_384) for seq in (2, 3)]
        front.backend.gate.set()
        for each in requests:
            await front.result(each)

    assert drive(work, tmp_path).backend.groups == [["one"], ["two"], ["two"], ["one"], ["one"]]


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 4_095, 10_000])
def test_samples_of_a_session_do_not_wait_for_all_those_of_another(tmp_path, most):
    """Four answers that fill the context of 4096 tokens are a turn, whether they were asked for with more tokens, or without a
    number. The engine decodes one answer at a time, so one request is sent to it after another."""

    async def work(front: Front):
        run = await front.new_run("r")
        front.backend.gate.clear()
        await front.submit(run, 1, 3)
        assert await asyncio.to_thread(front.backend.entered.wait, 60)  # the engine is busy
        samples = front.service.samples
        for session, count, tokens in (("s", 6, most), ("t", 2, 4_095)):
            sampler = sampler_of(session)
            for number in range(count):
                request = SampleRequest(
                    f"{session}:{number}", samples.snapshot_of(sampler), [EncodedTextChunk([3])], 4, Sampling(tokens)
                )
                samples.take_in(request, sampler, 10)
        front.backend.gate.set()
        for session, count in (("s", 6), ("t", 2)):
            for number in range(count):
                assert await front.service.futures.wait(f"{session}:{number}", 60) is not None

    front = drive(work, tmp_path, engine=EngineOptions(max_num_seqs=1))
    assert front.backend.submitted == ["s:0", "t:0", "s:1", "t:1", "s:2", "s:3", "s:4", "s:5"]


def sampler_of(session: str) -> Sampler:
    return Sampler(
        id=f"{session}:sample:0",
        session=session,
        owner="ann",
        base_model="tiny/vector",
        directory=None,
    )
