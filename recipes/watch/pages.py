"""Pages of a run and of a data set: templates that escape all text. A page loads nothing and runs no code.

What a command prints is a template too, ``NAME.txt``, whose text is not escaped.
"""

import base64
import io
import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from PIL import Image
from rich.markup import escape

from dataproto.errors import replace_file

TEMPLATES = Path(__file__).parent / "templates"
MAX_TEXT = 4000
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """A text whose control characters, which a terminal would obey, are visible.

    >>> visible("<b>\\x00")
    '<b>\ufffd'
    """
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def cut(value: Any) -> str:
    """A value as text, cut if it is very long."""
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"


def number(value: float) -> str:
    """A number in few characters.

    >>> [number(value) for value in (0, 0.25, 12.0, 1234.5, 12345678, 0.00004, -0.5, float("nan"))]
    ['0', '0.25', '12', '1.23k', '12.3M', '4e-05', '-0.5', '–']
    """
    if not math.isfinite(value):
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds.

    >>> [format_seconds(value) for value in (0.4, 59.9, 61, 3661, 90000, float("nan"))]
    ['0:00', '1:00', '1:01', '1:01:01', '25:00:00', '?']
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def png(image: Image.Image) -> Markup:
    """A picture as an address that holds its content."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return Markup(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")


def sound(wav: bytes) -> Markup:
    """A sound as an address that holds its content."""
    return Markup(f"data:audio/wav;base64,{base64.b64encode(wav).decode()}")


def render(template: str, **values: Any) -> Markup:
    """A template of the folder ``templates`` with its values, of which all text is escaped."""
    return Markup(_environment.get_template(template).render(**values))


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Writes a page, and returns its path.

    Raises:
        FileNotWritten: the folder does not exist, or the disk is full, say.
    """
    return replace_file(path, render(template, **values).encode(errors="replace"))


def _finished(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(["html", "svg"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    finalize=_finished,
)
_environment.filters.update(cut=cut, number=number, duration=format_seconds, png=png, sound=sound, markup=escape)
