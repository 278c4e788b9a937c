"""The policy inside vLLM: the worker that samples with it, the scheduler, and what drafts tokens. vLLM imports these by their
names.
"""

from rollout.vllm.policy.runners import choose_runner, takes_second_runner

__all__ = ["choose_runner", "takes_second_runner"]
