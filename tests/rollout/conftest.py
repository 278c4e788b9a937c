"""Settings of the tests of engines."""

from helpers.interpreted_triton import register

register()
