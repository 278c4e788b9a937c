"""A small vision-language model made on the spot, of the real Hugging Face class."""

from recipes.tiny.model import TinyConfig, make_tiny_model

__all__ = ["TinyConfig", "make_tiny_model"]
