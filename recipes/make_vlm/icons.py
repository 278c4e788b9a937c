"""Pictures of named things: the emoji of an npm package, and questions about them."""

import json
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dataproto.errors import FileFormatError
from rollout.prompts.images import load_image

SIDE = 64  # pixels of an icon
CATEGORIES = ("Activities", "Animals & Nature", "Food & Drink", "Objects", "Travel & Places")
"""Those whose pictures show a thing that its name names; left out are faces, people, flags and symbols."""
_NAME = re.compile(r"(?!.*\b(symbol|sign)\b)[a-z]+([ -][a-z]+){0,2}")  # of the things themselves
_FILE = re.compile(r"package/img/google/64/(.+\.png)")


@dataclass(frozen=True)
class Icon:
    """A picture ``(64, 64)`` on white, and its name in small letters."""

    name: str
    image: Image.Image

    @property
    def phrase(self) -> str:
        """The name with its article.

        >>> Icon("apple", Image.new("RGB", (64, 64))).phrase, Icon("books", Image.new("RGB", (64, 64))).phrase
        ('an apple', 'books')
        """
        if self.name.endswith("s") and not self.name.endswith(("ss", "us", "is", "os")):
            return self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"


def read_icons(tarball: Path) -> tuple[Icon, ...]:
    """The icons of `CATEGORIES` with names of at most three words, in the package's order. Nothing is unpacked to the disk.

    Raises:
        FileFormatError: the file is no such package.
    """
    listed, pictures = [], {}
    try:
        with tarfile.open(tarball, "r:gz") as archive:
            for member in archive:
                found, content = _FILE.fullmatch(member.name), archive.extractfile(member)
                if content is not None and found:
                    pictures[found[1]] = content.read()
                elif content is not None and member.name == "package/emoji.json":
                    listed = json.load(content)
        named = {
            entry["name"].lower(): pictures[entry["image"]]
            for entry in listed
            if entry["category"] in CATEGORIES and entry["has_img_google"] and entry["subcategory"] != "time"
        }
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{tarball} is no package of emoji: {error}") from error
    icons = tuple(Icon(name, load_image(picture)) for name, picture in named.items() if _NAME.fullmatch(name))
    if not icons:
        raise FileFormatError(f"{tarball} is no package of emoji: it has no pictures with names")
    return icons
