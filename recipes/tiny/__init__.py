"""A small Qwen2.5-VL checkpoint of the Hugging Face class, created locally."""

from recipes.tiny.tiny_model import TinyConfig, make_tiny_model
from recipes.tiny.warm_up import WarmUpConfig, tiny_checkpoint, warm_up

__all__ = ["TinyConfig", "WarmUpConfig", "make_tiny_model", "tiny_checkpoint", "warm_up"]
