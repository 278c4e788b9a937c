"""Options that several commands share, without torch."""

__all__: list[str] = []
