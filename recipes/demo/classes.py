"""Pictures of 48 classes, unlimited by seed: a filled or outlined shape in a colour on white paper."""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from recipes.demo.problems import SIDE, Split

SUPERSAMPLING = 4
COLOURS = {
    "red": (214, 40, 40),
    "green": (34, 139, 34),
    "blue": (40, 70, 220),
    "orange": (245, 140, 20),
    "purple": (140, 40, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
FILLS = ("filled", "outlined")
CLASSES = tuple(f"{fill} {colour} {shape}" for fill in FILLS for colour in COLOURS for shape in SHAPES)


@dataclass(frozen=True)
class ClassPicture:
    """A picture and the properties that make up its class."""

    image: Image.Image
    colour: str
    shape: str
    fill: str

    @property
    def label(self) -> str:
        """The name of the class, one of `CLASSES`."""
        return f"{self.fill} {self.colour} {self.shape}"


def draw_class(index: int, seed: int = 0, split: Split = "train") -> ClassPicture:
    """Draws picture ``index`` of ``seed``, a pure function of its arguments. Position, size, rotation and shade are random.

    The splits use different random streams.

    >>> draw_class(3).label, draw_class(3).image.size
    ('filled black circle', (56, 56))
    """
    random = Random(f"classes/{split}/{seed}/{index}")
    colour, shape, fill = random.choice(list(COLOURS)), random.choice(SHAPES), random.choice(FILLS)
    shade = tuple(min(max(value + random.randint(-20, 20), 0), 255) for value in COLOURS[colour])
    radius = random.uniform(13, 20)
    center = complex(*(random.uniform(radius + 2, SIDE - radius - 2) for _ in range(2)))
    turn = cmath.rect(1, math.radians(random.uniform(-15, 15)))
    large = Image.new("RGB", (SIDE * SUPERSAMPLING,) * 2, "white")
    _draw(ImageDraw.Draw(large), shape, center, radius, turn, shade, fill)
    return ClassPicture(large.resize((SIDE, SIDE), Image.Resampling.LANCZOS), colour, shape, fill)


def _draw(
    pen: ImageDraw.ImageDraw, shape: str, center: complex, radius: float, turn: complex, shade: Any, fill: str
) -> None:
    scale = SUPERSAMPLING
    width = round(4.5 * scale)
    inside = shade if fill == "filled" else None
    if shape == "circle":
        box = [(part - side * radius) * scale for side in (1, -1) for part in (center.real, center.imag)]
        pen.ellipse(box, fill=inside, outline=shade, width=width)
        return
    corners = [(center + turn * radius * corner) * scale for corner in OUTLINES[shape]]
    points = [(corner.real, corner.imag) for corner in corners]
    if inside:
        pen.polygon(points, fill=inside)
    pen.line([*points, points[0], points[1]], fill=shade, width=width, joint="curve")


def _regular(corners: int, start: float) -> list[complex]:
    return [cmath.rect(1, math.radians(start + 360 * number / corners)) for number in range(corners)]


def _cross(arm: float = 0.32) -> list[complex]:
    quarter = [complex(arm, -1), complex(arm, -arm), complex(1, -arm)]
    return [corner * 1j**turn for turn in range(4) for corner in quarter]


OUTLINES: dict[str, Sequence[complex]] = {"square": _regular(4, 45), "triangle": _regular(3, -90), "cross": _cross()}
