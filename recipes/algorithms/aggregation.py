"""Aggregation modes, beside the other algorithms. They live in `workers.aggregation`, since the workers apply them."""

from workers.aggregation import MODES, AggregationMode, aggregate, denominator, token_weights

__all__ = ["MODES", "AggregationMode", "aggregate", "denominator", "token_weights"]
