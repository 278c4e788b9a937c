"""Rows of a data set in the terminal."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from recipes.rewards.truth_check import Result
from recipes.show.shown_rows import ShownRow, ShownSource

STYLES = {"text": "", "special": "cyan", "media": "magenta"}
LEARNT, BEGIN, END = "bold green", "⟦", "⟧"
"""How what is learnt looks; the marks show it without colours too."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def print_source(source: ShownSource, console: Console | None = None) -> None:
    """Prints the rows of a data set and what there is to say of them."""
    console = console or Console(highlight=False)
    _say(console, (source.name, "bold"))
    for row in source.rows:
        console.print()
        _print_row(row, console)
    console.print()
    for line in source_lines(source):
        _say(console, line)


def source_lines(source: ShownSource) -> Iterable[str]:
    """What there is to say of all rows of a data set."""
    yield f"columns that are read: {', '.join(source.read) or 'none'}"
    if source.others:
        what = "columns that are not read" if source.supervised else "columns that only the reward gets"
        yield f"{what}: {', '.join(source.others)}"
    if source.unasked is not None:
        yield f"the reward is not asked what it gives the truth: {source.unasked}"
    if source.fault is not None:
        yield f"the reward refuses these rows: {source.fault}"


def row_facts(row: ShownRow) -> dict[str, str]:
    """The tokens, pictures and truth of a row, and what the reward gives, by name."""
    learnt = "" if row.learnt is None else f", {row.learnt} of them learnt"
    facts = {"tokens": f"{row.tokens}{learnt}"}
    if row.sizes:
        facts["pictures"] = "; ".join(row.sizes)
    if row.learnt is None:
        facts["truth"] = "none" if row.truth is None else repr(row.truth)
    if row.scores is not None:
        facts["reward of the truth"] = f"{_numbers(row.scores.right)} for {row.scores.answer!r}"
        if row.scores.wrong is not None:
            facts["reward of a wrong answer"] = _numbers(row.scores.wrong)
        facts["reward of an empty answer"] = _numbers(row.scores.empty)
        if not row.scores.is_best:
            facts["warning"] = "the reward does not give its best to the truth"
    return facts


def _print_row(row: ShownRow, console: Console) -> None:
    if row.error is not None:
        _say(console, (f"row {row.index} cannot be used: ", "bold red"), row.error)
        return
    _say(console, (f"row {row.index}", "bold"))
    text = Text()
    learning = False
    for span in row.spans:
        if span.learnt != learning:
            text.append(BEGIN if span.learnt else END, LEARNT)
            learning = span.learnt
        text.append(_safe(span.text), LEARNT if span.learnt else STYLES[span.kind])
    if learning:
        text.append(END, LEARNT)
    console.print(text, soft_wrap=True)
    for name, value in row_facts(row).items():
        _say(console, (f"{name}: ", "yellow" if name == "warning" else "dim"), value)


def _numbers(result: Result) -> str:
    """
    >>> _numbers({"score": 0.9, "acc": 1.0})
    '0.9 (acc 1)'
    """
    parts = ", ".join(f"{name} {value:g}" for name, value in result.items() if name != "score" and value is not None)
    return f"{result['score']:g}" + (f" ({parts})" if parts else "")


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    styled = ((part, "") if isinstance(part, str) else part for part in parts)
    console.print(Text.assemble(*((_safe(text), style) for text, style in styled)), soft_wrap=True)


def _safe(text: str) -> str:
    """A text of a data set without control characters, which a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
