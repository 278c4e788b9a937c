"""Roles of a mixture replay routing unless they are told not to, and a run says so."""

import pytest
import torch

from dataproto.columns import PROMPT_ROUTED_EXPERTS, ROUTED_EXPERTS
from dataproto.vlm import family_of
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from recipes.run.policy_gradient import announce_replay
from rollout.engine import SamplingParams
from rollout.prompts import PromptBuilder
from workers import launch
from workers.roles.actor import ActorConfig
from workers.roles.rollout_worker import RolloutConfig

MOE = "qwen3_vl_moe"


@pytest.mark.parametrize(
    ("model_type", "options", "said"),
    [
        (MOE, {}, "routing replay: the actor uses the experts"),
        (MOE, {"replay_routing": False}, "no routing replay: --rollout.no-replay-routing"),
        (MOE, {"engine": "rollout.hf.adapter_engine:AdapterEngine"}, "AdapterEngine names no experts"),
        ("qwen3_vl", {}, ""),
    ],
)
def test_one_line_says_whether_routing_is_replayed(capsys, model_type, options, said):
    announce_replay(RolloutConfig("path", **options), family_of(model_type))
    line = capsys.readouterr().out
    assert said in line
    assert line.count("\n") == bool(said)


def test_roles_replay_what_the_engine_chose(tmp_path):
    path = write_checkpoint(MOE, tmp_path)
    prompts = PromptBuilder.from_pretrained(path, max_prompt_length=300)(ROWS[:2])
    sampling = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    found = []
    for replays in (True, False):
        with launch(actor=ActorConfig(path), rollout=RolloutConfig(path, replay_routing=replays)) as roles:
            data = roles.rollout.generate(prompts, sampling)
            data |= roles.actor.log_probs(data)
            assert ((PROMPT_ROUTED_EXPERTS in data) and (ROUTED_EXPERTS in data)) == replays
            metrics = roles.actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
            assert metrics["actor/grad_norm"] > 0
            found.append(data)
    torch.testing.assert_close(found[0]["old_log_probs"], found[0]["rollout_log_probs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[0]["old_log_probs"], found[1]["old_log_probs"], atol=1e-5, rtol=0)
