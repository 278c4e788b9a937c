"""The benchmark of carried-over decoding: lengths, groups and decoding steps, with the Hugging Face engine and a tiny model."""

import pytest

from benchmarks.carried_decoding import DecodedStep, Decoding, rollout_worker, table
from benchmarks.geo3k_step import drawn_length, rest_of
from helpers.checkpoints import write_checkpoint
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder

SAMPLING = SamplingParams(n=3, max_tokens=48, ignore_eos=True)


def test_lengths_are_log_normal_with_a_fifth_of_the_limit_as_mean():
    lengths = [drawn_length(seed, 2048) for seed in range(4000)]
    assert max(lengths) == 2048
    assert sum(lengths) / len(lengths) == pytest.approx(400, rel=0.05)  # cut at the limit
    assert sorted(lengths)[2000] == pytest.approx(400 * 0.726, rel=0.05)  # exp(-0.8 ** 2 / 2)
    assert [drawn_length(seed, 2048) for seed in range(9)] == lengths[:9]


def test_a_response_that_goes_on_has_the_length_that_it_began_with():
    length = drawn_length(7, 2048)
    assert rest_of(7, 100, 2048 - 100) == length - 100
    assert rest_of(7, length + 5, 2048 - length - 5) == 1


@pytest.mark.slow
def test_steps_of_carried_samples_have_as_many_groups_in_fewer_decoding_steps(tmp_path):
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    prompts = PromptBuilder.from_pretrained(path, 300)([{"prompt": f"number {row}"} for row in range(4)])
    worker = rollout_worker(path, "hf", {"max_num_seqs": 64})
    found = {}
    for over_ask in (1.0, 1.5):
        decoding = Decoding(worker, prompts, SAMPLING, over_ask)
        found[over_ask] = [decoding.step() for _ in range(4)]
    assert {step.groups for steps in found.values() for step in steps} == {4}
    assert [step.carried for step in found[1.0]] == [0] * 4
    assert all(step.carried == 2 for step in found[1.5])
    assert all(step.polls > 1 for steps in found.values() for step in steps)
    assert sum(step.polls for step in found[1.5][1:]) < sum(step.polls for step in found[1.0][1:])
    assert "poll" not in vars(worker.engine)


def test_the_table_says_whether_a_third_is_saved():
    steps = {1.0: [DecodedStep(5.0, 4, 90, 0, 20), DecodedStep(3.0, 4, 90, 0, 20)]}
    cells = table(steps | {1.25: [DecodedStep(1.0, 4, 90, 1, 9), DecodedStep(2.0, 4, 90, 1, 9)]}).splitlines()
    assert cells[-1] == "| 1.25 | 2.00 (2.0 to 2.0) | 9 | 2.00 | 45 | 1.0 | 0.667, at least a third less |"
    assert "not a third less" in table(steps | {1.25: [DecodedStep(1.0, 4, 90, 1, 9), DecodedStep(2.1, 4, 90, 1, 9)]})
