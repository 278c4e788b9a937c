"""Which of vLLM's two model runners an engine runs on."""

import os
import re
from typing import Any

import torch

from dataproto.vlm.family import VLMFamily

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""Chooses the second model runner, or the first with "0". The engine sets it at each start, see `takes_second_runner`."""
SECOND_RUNNER_UNTIL = 0, 30
"""Later versions deal the rows of the second runner out over ranks, and their samplers need more than the policy's has."""
FIRST_RUNNER_ASKED = os.environ.get(RUNNER_VARIABLE) == "0"
"""Whether the user has asked for vLLM's first model runner."""


def takes_second_runner(
    version: str, family: VLMFamily, config: Any, device: torch.device, routed_experts: bool, speculate: int
) -> bool:
    """Whether an engine of this ``version`` of vLLM runs on the second model runner (`rollout.vllm.policy.second_runner`), whose
    steps cost the host less.

    It needs CUDA. It takes no recurrent layers whose states are shared by requests, records no experts, has no drafts of ours,
    and computes causal attention within images.
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    known = number is not None and tuple(map(int, number.groups())) < SECOND_RUNNER_UNTIL and device.type == "cuda"
    plain = family.recurrent_mixers is None and family.mutual_images(config) is None
    return known and plain and not routed_experts and not speculate and not FIRST_RUNNER_ASKED


def choose_runner(second: bool) -> None:
    """Has vLLM take its second model runner, or its first, for the engine that starts next."""
    from vllm import envs

    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()  # an earlier engine of the process may have kept its values
    os.environ[RUNNER_VARIABLE] = str(int(second))
