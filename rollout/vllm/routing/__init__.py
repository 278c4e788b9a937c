"""The experts that vLLM's routers choose, for routing replay. The worker imports vLLM, and is named to it, not imported."""

from rollout.vllm.routing.expert_slots import ExpertSlots

__all__ = ["ExpertSlots"]
