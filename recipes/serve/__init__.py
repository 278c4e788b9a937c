"""Training driven step by step by another program."""

from recipes.serve.training_client import ForwardBackwardOutput, SampledSequence, TrainingClient

__all__ = ["ForwardBackwardOutput", "SampledSequence", "TrainingClient"]
