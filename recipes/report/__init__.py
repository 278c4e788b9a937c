"""A run as a page for readers."""
