"""Options that only a file sets."""

from collections.abc import Sequence
from pathlib import Path

from recipes.options.names import FILE_ONLY


def in_files(words: Sequence[str], folder: Path) -> list[str]:
    """A command line whose options for files stand in a file in ``folder``; each has at most one value."""
    rest, lines, left = [], [], list(words)
    while left:
        word = left.pop(0)
        if word.removeprefix("--") not in FILE_ONLY:
            rest.append(word)
        elif left and not left[0].startswith("--"):
            lines.append(f"{word.removeprefix('--')}: {left.pop(0)}\n")
        else:
            lines.append(f"{word.removeprefix('--')}: true\n")
    if not lines:
        return rest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.yaml").write_text("".join(lines))
    return [*rest, "--config", str(folder / "options.yaml")]
