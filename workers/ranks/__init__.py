"""Ranks of a layout: positions, process groups, dispatch of calls, and failures."""
