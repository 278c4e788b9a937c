"""Data sets as batches of rows."""
