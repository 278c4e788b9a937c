"""Aggregation modes, beside the other algorithms. They live in `workers.training.aggregation`, since the workers apply them."""

from workers.training.aggregation import MODES, AggregationMode, aggregate, denominator, token_weights

__all__ = ["MODES", "AggregationMode", "aggregate", "denominator", "token_weights"]
