"""Batches as bytes: `leaves` encodes tensors, arrays and images for `wire` (pickle), `file` and the collectives."""
