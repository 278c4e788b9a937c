"""A folder with the layout of easy-vqa, small and made on the spot."""

import io
import json
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS, SHAPES = ("red", "blue", "green"), ("circle", "rectangle")


def picture(number: int) -> tuple[bytes, str, str]:
    """A PNG file, and the colour and the shape that it shows."""
    colour, shape = COLOURS[number % 3], SHAPES[number // 3 % 2]
    image = Image.new("RGB", (64, 64), (240, 240, 250 - number % 7))
    box = (8, 8, 30 + number % 11, 30 + number % 11)
    (ImageDraw.Draw(image).ellipse if shape == "circle" else ImageDraw.Draw(image).rectangle)(box, fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue(), colour, shape


def write_easy_vqa(path: Path, train: int = 12, test: int = 6) -> Path:
    """Writes a folder with ``train`` and ``test`` pictures and three questions about each."""
    for split, count, first in (("train", train, 0), ("test", test, 100)):
        folder = path / "easy_vqa" / "data" / split
        (folder / "images").mkdir(parents=True)
        asked = []
        for number in range(count):
            png, colour, shape = picture(first + number)
            (folder / "images" / f"{number}.png").write_bytes(png)
            asked += [["what color is the shape?", colour, number], ["what shape is present?", shape, number]]
            asked += [["is there a red shape?", "yes" if colour == "red" else "no", number]]
        (folder / "questions.json").write_text(json.dumps(asked))
    return path
