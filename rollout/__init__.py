"""Turning prompts into responses: engines, sampling, prompt building."""

from rollout.engine import Completion, Request, RolloutEngine, SamplingParams, create_engine

__all__ = ["Completion", "Request", "RolloutEngine", "SamplingParams", "create_engine"]
