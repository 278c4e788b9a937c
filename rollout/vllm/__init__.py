"""The vLLM engine. vLLM itself is loaded when an engine is created."""

from rollout.vllm.lora_engine import VLLMAdapterEngine
from rollout.vllm.vllm_engine import VLLMEngine

__all__ = ["VLLMAdapterEngine", "VLLMEngine"]
