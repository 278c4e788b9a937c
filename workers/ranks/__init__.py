"""Ranks, the layout they form, and how a call is split over them."""
