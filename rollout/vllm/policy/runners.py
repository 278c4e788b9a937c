"""Which of vLLM's two model runners an engine runs on."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dataproto.vlm.family import VLMFamily

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""With "1" it asks for the second model runner."""
SECOND_RUNNER_VERSION = "0", "24"
"""The version whose second runner has run with the policy's sampler. Others have other calls of a sampler."""


def takes_second_runner(
    version: str, family: VLMFamily, config: Any, device: torch.device, routed_experts: bool, speculate: int
) -> bool:
    """Whether an engine of this ``version`` of vLLM runs on the second model runner (`rollout.vllm.policy.second_runner`).

    It does if `RUNNER_VARIABLE` asks for it, on CUDA. Models with recurrent layers, models with images whose tokens see each
    other, engines that record experts and engines that draft tokens run on the first one all the same.
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    asked = os.environ.get(RUNNER_VARIABLE) == "1" and device.type == "cuda"
    plain = family.recurrent_mixers is None and family.mutual_images(config) is None
    known = number is not None and number.groups() == SECOND_RUNNER_VERSION
    return asked and known and plain and not routed_experts and not speculate


@contextmanager
def runner_chosen(second: bool) -> Iterator[None]:
    """Has vLLM take its second model runner, or its first, for an engine that starts within the block."""
    from vllm import envs

    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()  # an earlier engine of the process may have kept its values
    asked = os.environ.get(RUNNER_VARIABLE)
    os.environ[RUNNER_VARIABLE] = str(int(second))
    try:
        yield
    finally:
        os.environ.pop(RUNNER_VARIABLE)
        if asked is not None:
            os.environ[RUNNER_VARIABLE] = asked
