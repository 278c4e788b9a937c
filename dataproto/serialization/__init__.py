"""Batches as bytes: on a wire, in a file, between processes."""
