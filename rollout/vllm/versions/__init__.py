"""Where vLLM 0.24 to 0.32 need more than documented options, and where their internals differ."""

from rollout.vllm.versions.process_settings import import_vllm, set_environment

__all__ = ["import_vllm", "set_environment"]
