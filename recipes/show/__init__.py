"""The first rows of a data set as a model sees them: ``dataproto show DATA``; its options are `recipes.show.show_config`."""

__all__: list[str] = []
