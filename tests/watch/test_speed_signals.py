"""What the console says of steps that are slower than they have to be."""

import pytest

from recipes.watch.signals import Signals

STEP = {"timing_s/update_actor": 30.0, "timing_s/gen": 20.0, "timing_s/update_actor/forward": 14.0}


def after(steps: int) -> Signals:
    signals = Signals()
    for _ in range(steps):
        assert signals.new_signs(STEP | {"perf/compilations": 0, "perf/allocator_retries": 0}) == []
    return signals


def test_a_phase_that_doubles_is_named_once():
    """The update of the step after two others takes twice as long, and so does the next one."""
    signals, slow = after(3), STEP | {"timing_s/update_actor": 61.6}
    assert signals.new_signs(slow) == ["warning: update_actor took 61.6 s, 2.1 times its median"]
    assert signals.new_signs(slow) == []


@pytest.mark.parametrize("seconds", [45.0, 10.0])
def test_up_to_half_as_much_again_is_no_sign(seconds):
    assert after(3).new_signs(STEP | {"timing_s/update_actor": seconds}) == []


def test_the_first_step_is_no_measure_of_the_others():
    signals = Signals()
    assert signals.new_signs({"timing_s/gen": 1.0}) == []
    assert signals.new_signs({"timing_s/gen": 20.0}) == []


def test_compilation_is_expected_in_the_first_two_steps():
    compiled = STEP | {"perf/compilations": 3}
    signals = Signals()
    assert signals.new_signs(compiled) == signals.new_signs(compiled) == []
    (told,) = signals.new_signs(compiled)
    assert "compiled 3 graphs again in step 3" in told


def test_an_allocator_at_its_limit_is_told_with_the_way_out():
    (told,) = after(1).new_signs(STEP | {"perf/allocator_retries": 12})
    assert "12 times" in told
    assert "--token-budget" in told


def test_what_stays_unsharded_is_told_when_it_changes():
    signals = Signals()
    assert signals.new_signs({"perf/unsharded/actor": 0.0}) == []
    (told,) = signals.new_signs({"perf/unsharded/actor": 3.0})
    assert told.endswith("of the actor from now on: gradients (--unsharded)")
    assert signals.new_signs({"perf/unsharded/actor": 3.0}) == []
    assert len(signals.new_signs({"perf/unsharded/actor": 2.0})) == 1
