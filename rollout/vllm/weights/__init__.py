"""The weights of vLLM's model, what else it computes with, and which of both are in device memory."""

from rollout.vllm.weights.memory import EngineMemory
from rollout.vllm.weights.streamed_weights import StreamedWeights

__all__ = ["EngineMemory", "StreamedWeights"]
