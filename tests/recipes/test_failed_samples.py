"""Steps with carried samples whose engine fails at one of them."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from dataproto import object_array
from dataproto.errors import InvalidPrompt, InvalidRow, NonFiniteLogits, RowCountMismatch
from helpers.carried_runs import (
    BATCH,
    Group,
    Numbers,
    Run,
    close,
    failing,
    generated,
    played,
    refusing,
    reread,
    samples_of,
    uninterrupted,
)
from helpers.checkpoints import write_checkpoint
from recipes.run import carrying
from recipes.run.carrying import CarryingRollout
from recipes.run.look_ahead import LookAhead
from rollout import continuation
from rollout.engine import SamplingParams
from workers.cluster.local import LocalGroup
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker


@pytest.mark.slow
@pytest.mark.parametrize("sample", [generated, played])
def test_a_step_that_failed_at_a_sample_goes_on_with_what_had_begun(sample, tmp_path, monkeypatch):
    """The first step refuses, or fails at, the fourth prompt: it is made again, or another process makes the next one."""
    monkeypatch.setattr(continuation, "SUBMITTED_AT_A_TIME", 1)
    monkeypatch.setattr(carrying, "AT_A_TIME", 2.0)
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    group, later = [
        LocalGroup(RolloutWorker(RolloutConfig(path), lambda dtype: actor.named_weights())) for _ in range(2)
    ]
    run = Run(group, path, bound=3)
    prompts = next(run.rollout)
    error = InvalidPrompt if sample is generated else NonFiniteLogits
    with monkeypatch.context() as patch:
        if sample is generated:
            refusing(group.worker.engine, patch, "0-3-")
        else:
            failing(group.worker.engine, patch, "0-3-", polls=6)
        with pytest.raises(error, match=r"^row 3 \(uid 0-3-\w+\), sample [01]: "):
            sample(run.rollout, prompts)
    kept = sampled_so_far(run)
    assert sum(count > 0 for count in kept.values()) > BATCH
    run.done = 1  # what is sampled from now on has the second weights
    other = Run(later, path, 3, run.done)
    other.rollout.load_state_dict(reread(run.rollout.state_dict(), tmp_path))
    assert sampled_so_far(other) == kept
    again = [sample(run.rollout, prompts), run.step(sample)]
    for parts in (again, [other.step(sample) for _ in range(2)]):
        found = samples_of(parts)
        assert len(found) == 2 * BATCH
        close(found, uninterrupted(group, path, sample, found.keys()))
        for uid, count in of_first_weights(parts).items():
            assert count == kept.get(uid, 0)


def sampled_so_far(run) -> dict[str, int]:
    """The number of tokens that have been sampled of each group."""
    samples, found = run.rollout.samples, Counter()
    for uid, turns in zip(samples.unfinished["uid"], samples.unfinished["_begun"], strict=True):
        found[uid] += sum(len(turn["token_ids"]) for turn in turns)
    finished = [] if samples.finished is None else [samples.finished]
    for data in finished:
        for uid, mask in zip(data["uid"], data["response_mask"], strict=True):
            found[uid] += int(mask.sum())
    return dict(found)


def of_first_weights(parts) -> dict[str, int]:
    """The number of tokens of each group that the first weights have sampled."""
    found = Counter()
    for data in parts:
        for uid, mask, versions in zip(data["uid"], data["response_mask"], data["weight_version"], strict=True):
            found[uid] += int((versions[mask.bool()] == 1).sum())
    return found


class Idle(Group):
    """Finishes no group, and tells no error."""

    def submit(self, *arguments):
        found = super().submit(*arguments).result()
        found["_finished"] = torch.zeros(len(found), dtype=torch.bool)
        return SimpleNamespace(result=lambda: found)


def test_a_worker_that_ends_too_early_makes_no_smaller_batch():
    rollout = CarryingRollout(Idle(), LookAhead(Numbers()), 1, lambda: 0)
    with pytest.raises(RowCountMismatch, match="0 groups are whole, but a step takes 2"):
        rollout.generate(next(rollout), SamplingParams(n=1))


@pytest.mark.parametrize(("uids", "row"), [(["0", "1", "2", "1"], 1), (["0", "0"], 1)])
def test_two_groups_of_one_uid_are_refused(uids, row):
    class Repeating(Numbers):
        def __next__(self):
            batch = super().__next__()
            batch["uid"] = object_array([uids[int(uid)] for uid in batch["uid"]])
            return batch

    rollout = CarryingRollout(Group(), LookAhead(Repeating()), 1, lambda: 0)
    with pytest.raises(InvalidRow, match=rf"row {row}: uid {uids[-1]} is that of another prompt"):
        rollout.generate(next(rollout), SamplingParams(n=1))


class FailsAt(Group):
    """Fails at the first sample of one call, by its number from 1."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def submit(self, *arguments):
        answer = super().submit(*arguments)
        if len(self.calls) == self.call:
            found = answer.result()
            found["_finished"] = torch.zeros(len(found), dtype=torch.bool)
            found["_failed"] = object_array([["InvalidPrompt", "no room"], *[None] * (len(found) - 1)])
        return answer


def failing_at(call: int, bound: int) -> CarryingRollout:
    return CarryingRollout(FailsAt(call), LookAhead(Numbers()), bound, lambda: 0, apart=True)


@pytest.mark.parametrize("repeated", [True, False])
def test_no_prompt_is_lost_when_the_engine_fails_at_a_batch_that_it_decodes_ahead(repeated):
    """The second step raises. It is made again, or the third one is made."""
    rollout = failing_at(2, 1)
    first = rollout.generate(next(rollout), SamplingParams())
    prompts = next(rollout)
    with pytest.raises(InvalidPrompt, match=r"^uid 0, sample 0: no room"):
        rollout.generate(prompts, SamplingParams())
    found = [first, *([rollout.generate(prompts, SamplingParams())] if repeated else [])]
    found += [rollout.generate(next(rollout), SamplingParams()) for _ in range(2)]
    learned = {uid for data in found for uid in data["uid"]} | set(rollout.samples.since)
    assert learned >= {str(number) for number in range(8)}


def test_a_step_in_parts_that_failed_is_made_again():
    """What it has given is decoded once more, by the same weights."""
    for call in (1, 2):
        rollout = failing_at(call, 0)
        prompts = next(rollout)
        with pytest.raises(InvalidPrompt, match=r"^uid 0, sample 0: no room"):
            list(rollout.in_parts(prompts, SamplingParams()))
        again = list(rollout.in_parts(prompts, SamplingParams()))
        assert sorted(uid for part in again for uid in part["uid"]) == ["0", "1"]


@pytest.mark.parametrize("saved", [True, False])
def test_nothing_of_a_failed_step_is_left_behind_a_loaded_state(saved):
    rollout = failing_at(2, 1)
    start = rollout.state_dict()
    rollout.generate(next(rollout), SamplingParams())  # the second batch is being decoded, and fails
    if saved:
        rollout.state_dict()
    rollout.load_state_dict(start)
    assert rollout.generate(next(rollout), SamplingParams())["uid"].tolist() == ["1", "2"]
    assert sorted(rollout.samples.since) == ["0", "3"]


def test_a_loaded_state_begins_a_step_that_had_failed_before_from_its_prompts():
    rollout = failing_at(1, 0)
    start = rollout.state_dict()
    prompts = next(rollout)
    with pytest.raises(InvalidPrompt):
        next(rollout.in_parts(prompts, SamplingParams()))
    rollout.load_state_dict(start)
    data = list(rollout.in_parts(prompts, SamplingParams()))
    assert [uid for part in data for uid in part["uid"]] == ["1", "0"]
