"""The Hugging Face engine. Importing it loads transformers."""

from dataproto.extras import require_extra

require_extra("train", "rollout.hf", "transformers")

from rollout.hf.hf_engine import HFEngine

__all__ = ["HFEngine"]
