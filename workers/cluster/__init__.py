"""Launches the roles of a run in this process or in many by Ray, and calls them."""
