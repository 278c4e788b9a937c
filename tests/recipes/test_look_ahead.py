"""The next batch, looked at early or prepared by a thread: the same batches, positions and errors."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dataproto import DataProto
from dataproto.errors import InvalidRow
from helpers.tiny_prompts import tiny_builder
from recipes.data.loader import PromptLoader
from recipes.demo.tiny_model import make_tiny_model
from recipes.grpo import grpo_step, parse
from recipes.run import look_ahead, policy_gradient
from recipes.run.look_ahead import LookAhead


class Numbers:
    """Batches of one number; every third draw is skipped, and those of `bad` raise."""

    def __init__(self, bad=()):
        self.drawn, self.skipped, self.bad, self.threads = 0, {}, bad, []

    def __next__(self):
        self.threads.append(threading.current_thread().name)
        if self.drawn in self.bad:
            raise InvalidRow(self.drawn, "bad")
        if self.drawn % 3 == 2:
            self.skipped[self.drawn] = "a third"
            self.drawn += 1
        self.drawn += 1
        return DataProto.from_dict({"x": torch.tensor([self.drawn - 1])})

    def state_dict(self):
        return {"drawn": self.drawn, "skipped": sorted(self.skipped)}

    def load_state_dict(self, state):
        self.drawn, self.skipped = state["drawn"], dict.fromkeys(state["skipped"], "a third")


def number(batch):
    return batch["x"].item()


def wait_for_next(loader):
    """Until the thread has prepared the next batch, or failed."""
    if loader._preparing is not None:
        loader._preparing._begins.set()
        loader._preparing.batch.exception()


@pytest.mark.parametrize("background", [False, True])
def test_batches_positions_and_skipped_rows_are_those_of_the_loader(background):
    plain, ahead = Numbers(), LookAhead(Numbers(), background)
    assert ahead.state_dict() == plain.state_dict()
    for step in range(8):
        assert number(next(ahead)) == number(next(plain))
        wait_for_next(ahead)
        if step % 2:
            ahead.peek()
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.skipped == plain.skipped
    assert set(ahead.loader.threads[1:]) == {"next batch" if background else "MainThread"}
    assert len(ahead.loader.threads) == 9  # one more than was returned


@pytest.mark.parametrize("background", [False, True])
def test_a_restored_position_forgets_what_was_prepared(background):
    ahead = LookAhead(Numbers(), background)
    before = [number(next(ahead)) for _ in range(2)]
    saved = ahead.state_dict()
    rest = [number(next(ahead)) for _ in range(4)]
    ahead.load_state_dict(saved)
    assert ahead.skipped == {}
    assert [number(next(ahead)) for _ in range(4)] == rest
    assert (before, rest) == ([0, 1], [3, 4, 6, 7])


def test_several_batches_are_shown_before_they_are_returned():
    ahead = LookAhead(Numbers(), background=True)
    next(ahead)
    shown = [number(ahead.peek(place)) for place in (2, 0, 1)]
    assert (shown, ahead.state_dict()) == ([4, 1, 3], {"drawn": 1, "skipped": []})
    assert [number(next(ahead)) for _ in range(4)] == [1, 3, 4, 6]
    assert ahead.state_dict() == {"drawn": 7, "skipped": [2, 5]}
    ahead.close()


def test_a_batch_is_prepared_while_nobody_asks_for_it(monkeypatch):
    monkeypatch.setattr(look_ahead, "DELAY_S", 0.01)
    ahead = LookAhead(Numbers(), background=True)
    next(ahead)
    assert number(ahead._preparing.batch.result(timeout=60)) == 1


def test_a_batch_that_is_prepared_early_is_sent_and_one_that_is_waited_for_is_not(monkeypatch):
    sent, failed = [], threading.Event()

    def send(batch):
        sent.append(number(batch))
        if len(sent) == 2:
            failed.set()
            raise OSError("the step that uses it tells")

    ahead = LookAhead(Numbers(), background=True)
    ahead.send = send
    for delay, expected in ((0.01, [1]), (60, [1]), (0.01, [1, 4])):
        monkeypatch.setattr(look_ahead, "DELAY_S", delay)
        next(ahead)
        thread = ahead._preparing._thread
        if delay > 1:
            ahead._preparing._begins.set()
        thread.join(60)
        assert sent == expected
    assert failed.is_set()
    assert number(next(ahead)) == 4
    ahead.close()


def test_closing_ends_a_thread_that_has_not_begun_and_waits_for_one_that_has():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __next__(self):
            if self.drawn:
                begun.set()
                go_on.wait()
            return super().__next__()

    for asked in (False, True):
        ahead = LookAhead(Slow(), background=True)
        next(ahead)
        thread = ahead._preparing._thread
        if asked:
            ahead._preparing._begins.set()
            begun.wait()
            threading.Timer(0.1, go_on.set).start()
        ahead.close()
        assert not thread.is_alive()
        assert ahead.loader.drawn == 1 + asked


def test_an_interrupted_wait_leaves_the_thread_at_work(monkeypatch):
    ahead = LookAhead(Numbers(), background=True)
    next(ahead)
    preparing, result = ahead._preparing, ahead._preparing.result

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    monkeypatch.setattr(preparing, "result", result)
    assert number(next(ahead)) == 1


def test_batches_of_a_real_loader_are_those_without_a_thread():
    def loader():
        rows = [{"prompt": [{"role": "user", "content": f"Number {row}"}], "images": []} for row in range(5)]
        return PromptLoader(rows, tiny_builder("qwen2_5_vl"), 2, seed=1)

    plain, ahead = loader(), LookAhead(loader(), background=True)
    for _ in range(4):
        one, other = next(plain), next(ahead)
        assert one["uid"].tolist() == other["uid"].tolist()
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert plain.state_dict() == ahead.state_dict()
    ahead.close()


@pytest.mark.parametrize(("on", "background"), [("local", False), ("ray", True)])
def test_a_thread_prepares_batches_where_models_are_in_other_processes(tmp_path, monkeypatch, on, background):
    class Made(Exception):
        pass

    def made(loader, background=False):
        raise Made(background)

    monkeypatch.setattr(policy_gradient, "LookAhead", made)
    model = str(make_tiny_model(tmp_path / "model"))
    options = ["--preset", "tiny", "--model-path", model, "--on", on, "--eval-rows", "2"]
    options += ["--output-dir", str(tmp_path / "run")]
    with pytest.raises(Made) as caught:
        policy_gradient.run(parse(options), grpo_step)
    assert caught.value.args == (background,)


def test_the_thread_ends_before_the_roles_that_it_sends_to(tmp_path, monkeypatch):
    """After the end of Ray it would start another one by its first put."""
    threads, alive = [], []

    class Failed(Exception):
        pass

    @contextmanager
    def launched(*_):
        try:
            yield SimpleNamespace(send_ahead=print)
        finally:
            alive.extend(each.is_alive() for each in threads)

    def train(run, roles, batches, *_):
        next(batches)
        threads.append(batches._preparing._thread)
        raise Failed

    monkeypatch.setattr(look_ahead, "DELAY_S", 60.0)
    monkeypatch.setattr(policy_gradient, "launch_roles", launched)
    monkeypatch.setattr(policy_gradient, "carry_samples", lambda launched, ahead, *_, **__: (ahead, None))
    monkeypatch.setattr(policy_gradient, "train", train)
    options = ["--preset", "tiny", "--model-path", str(make_tiny_model(tmp_path / "model")), "--on", "ray"]
    with pytest.raises(Failed):
        policy_gradient.run(parse([*options, "--eval-rows", "2", "--output-dir", str(tmp_path / "run")]), grpo_step)
    assert alive == [False]


@pytest.mark.parametrize("background", [False, True])
def test_an_error_comes_when_its_batch_is_asked_for(background):
    ahead = LookAhead(Numbers(bad=(1,)), background)
    first = next(ahead)
    wait_for_next(ahead)
    assert (number(first), ahead.state_dict()["drawn"]) == (0, 1)
    for _ in range(2):  # it stays
        with pytest.raises(InvalidRow, match="row 1"):
            next(ahead)
    ahead.load_state_dict({"drawn": 0, "skipped": []})
    assert number(next(ahead)) == 0
