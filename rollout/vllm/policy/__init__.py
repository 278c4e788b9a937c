"""The policy inside vLLM: the worker that samples with it, the scheduler, and what drafts tokens. vLLM imports these by their
names.
"""

from rollout.vllm.policy.runners import runner_chosen, takes_second_runner

__all__ = ["runner_chosen", "takes_second_runner"]
