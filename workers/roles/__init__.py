"""The roles of a recipe: workers that hold a model, an engine or a reward function."""
