"""What is closed or stopped after an error of the server fails as well, and hides nothing."""

from contextlib import ExitStack

import pytest

from dataproto.errors import ending
from dataproto_server.backend import Failure, SampleRequest, Sampling
from dataproto_server.command import Supervisor
from dataproto_server.engine.in_process import InProcessEngine
from helpers.served_models import BASE, chunks


class Cause(RuntimeError):
    """The first error."""


class Later(RuntimeError):
    """What follows it."""


def fail(error: BaseException):
    def failing(*_, **__):
        raise error

    return failing


def test_requests_at_which_the_engine_fails_are_answered_though_it_cannot_stop_them(
    engine: InProcessEngine, monkeypatch
):
    engine.submit(SampleRequest("a", BASE, chunks(engine, "hello"), 1, Sampling(max_tokens=3)))
    (base,) = engine._open
    monkeypatch.setattr(base, "poll", fail(Cause("no memory")))
    monkeypatch.setattr(engine, "abort", fail(Later("no device")))
    ((request, failure),) = engine.poll().items()
    assert request == "a"
    assert isinstance(failure, Failure)
    assert failure.message.startswith("Cause in the server")
    monkeypatch.undo()
    engine.abort(["a"])


def test_a_supervisor_that_cannot_stop_a_process_stops_the_other_and_tells_the_first_error():
    stopped = []
    supervisor = object.__new__(Supervisor)
    ExitStack.__init__(supervisor)
    supervisor.enter_context(ending(lambda: stopped.append("front")))
    supervisor.enter_context(ending(fail(Later("engine"))))
    with pytest.raises(Cause) as caught, supervisor:
        raise Cause
    assert caught.value.__notes__ == ["and Later: engine"]
    assert stopped == ["front"]
