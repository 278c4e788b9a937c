"""Drawn geometry problems in the layout of Geometry3K, endless by seed: ``python -m recipes.synthetic --help``."""

from recipes.synthetic.problems import LEVELS, Problem, Split, make_problem, sample_texts, split_of

__all__ = ["LEVELS", "Problem", "Split", "make_problem", "sample_texts", "split_of"]
