"""Turning prompts into responses: engines, sampling, prompt building."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.engine import Completion, Request, RolloutEngine, SamplingParams, create_engine

__all__ = ["Completion", "Request", "RolloutEngine", "SamplingParams", "create_engine"]

__getattr__ = lazy_names(__name__, ".engine")
