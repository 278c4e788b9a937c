"""What a template makes: a question, its answer and the figure to be drawn, before any style is chosen."""

from dataclasses import dataclass

from recipes.synthetic.figure import Figure


@dataclass(frozen=True)
class Draft:
    """`text` never holds a number that the answer depends on: those stand in the figure.

    `unit` is the number of pixels of length 1 (None: as large as the picture allows).
    """

    text: str
    answer: str
    figure: Figure
    unit: float | None = None
