"""The Hugging Face engine. Importing it loads transformers."""

from dataproto.extras import require_extra

require_extra("train", "rollout.hf", "transformers")

from rollout.hf.adapter_engine import AdapterEngine
from rollout.hf.engine import HFEngine

__all__ = ["AdapterEngine", "HFEngine"]
