"""The Hugging Face engine. Importing it loads transformers."""

from dataproto.extras import require_extra

require_extra("train", "rollout.hf", "transformers")

from rollout.hf.adapter_engine import AdapterEngine, AdapterRequest, PromptScores
from rollout.hf.hf_engine import HFEngine

__all__ = ["AdapterEngine", "AdapterRequest", "HFEngine", "PromptScores"]
