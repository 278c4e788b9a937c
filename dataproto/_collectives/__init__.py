"""Batches between ranks: bytes are exchanged, and messages are batches as bytes."""
