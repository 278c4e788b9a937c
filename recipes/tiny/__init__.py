"""A small Qwen2.5-VL checkpoint of the Hugging Face class, created locally."""

from recipes.tiny.tiny_model import TinyConfig, is_whole, make_tiny_model, model_of_run
from recipes.tiny.warm_up import WarmUpConfig, tiny_checkpoint, warm_up

__all__ = ["TinyConfig", "WarmUpConfig", "is_whole", "make_tiny_model", "model_of_run", "tiny_checkpoint", "warm_up"]
