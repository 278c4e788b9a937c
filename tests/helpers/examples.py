"""Numbers of examples of property tests."""

from hypothesis import settings


def at_most(number: int) -> int:
    """``number``, or in the fast selection what its profile allows if that is less."""
    fast = settings.get_current_profile_name() == "fast"
    return min(number, settings.default.max_examples) if fast else number
