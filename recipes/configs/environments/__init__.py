"""The options of recipes that play episodes in an environment."""

__all__: list[str] = []
