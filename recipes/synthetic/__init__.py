"""Drawn geometry problems and pictures of classes, unlimited by seed; ``python -m recipes.synthetic --help``."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from recipes.synthetic.classes import CLASSES, ClassPicture, draw_class
    from recipes.synthetic.problems import LEVELS, Problem, Split, make_problem, sample_texts, split_of

__all__ = [
    "CLASSES",
    "LEVELS",
    "ClassPicture",
    "Problem",
    "Split",
    "draw_class",
    "make_problem",
    "sample_texts",
    "split_of",
]

__getattr__ = lazy_names(__name__, __file__)
