"""What surrounds a step: data, evaluation, checkpoints, metrics."""
