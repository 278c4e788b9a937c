"""The Hugging Face engine. Importing it loads transformers."""

from rollout.hf.hf_engine import HFEngine

__all__ = ["HFEngine"]
