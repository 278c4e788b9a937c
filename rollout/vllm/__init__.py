"""The vLLM engine. vLLM itself is loaded when an engine is created."""

from rollout.vllm.engine import VLLMEngine
from rollout.vllm.lora_engine import VLLMAdapterEngine

__all__ = ["VLLMAdapterEngine", "VLLMEngine"]
