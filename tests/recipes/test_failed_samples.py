"""Steps with carried samples whose engine fails at one of them."""

from collections import Counter

import pytest
import torch

from dataproto.errors import InvalidPrompt, NonFiniteLogits
from helpers.carried_runs import (
    BATCH,
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
from recipes.configs.shared.carrying_config import CarryingConfig
from rollout import carried_samples
from workers.cluster.local_group import LocalGroup
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker


@pytest.mark.slow
@pytest.mark.parametrize("sample", [generated, played])
def test_a_step_that_failed_at_a_sample_goes_on_with_what_had_begun(sample, tmp_path, monkeypatch):
    """The first step refuses, or fails at, the fourth prompt: it is made again, or another process makes the next one."""
    monkeypatch.setattr(carried_samples, "SUBMITTED_AT_A_TIME", 1)
    path = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    group, later = [
        LocalGroup(RolloutWorker(RolloutConfig(path), lambda dtype: actor.named_weights())) for _ in range(2)
    ]
    config = CarryingConfig(over_ask=2.0, max_staleness=3)
    run = Run(group, path, config)
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
    other = Run(later, path, config, run.done)
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
