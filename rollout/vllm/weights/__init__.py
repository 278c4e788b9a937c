"""The weights of vLLM's model, what else it computes with, and which of both are in device memory."""

from rollout.vllm.weights.memory import EngineMemory
from rollout.vllm.weights.weight_loading import differing_parameters, load_parameters

__all__ = ["EngineMemory", "differing_parameters", "load_parameters"]
