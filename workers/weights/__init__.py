"""Checkpoints whose weights are read and written by parts, so that no process ever holds the whole model."""
