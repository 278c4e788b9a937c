"""Rows of a data set as one self-contained page, which loads nothing and runs no code."""

from collections.abc import Sequence
from pathlib import Path

from dataproto.errors import writing
from recipes.report.charts import safe_text
from recipes.report.page import picture_html, section_html
from recipes.report.style import PAGE, STYLE
from recipes.show.shown_rows import ShownRow, ShownSource, Span
from recipes.show.terminal import row_facts, source_lines

OWN_STYLE = """
.cards { grid-template-columns: 1fr; } pre { max-height: none; }
pre .special { color: var(--c2); } pre .media { color: var(--c3); }
pre .learnt { background: var(--good-bg); color: var(--good); border-radius: 3px; }
.warning { color: var(--bad); }
"""


def write_page(path: Path, title: str, sources: Sequence[ShownSource]) -> Path:
    """Writes the rows to a file, and returns its path.

    Raises:
        FileNotWritten: the folder does not exist, or the disk is full, say.
    """
    page = PAGE.substitute(
        title=safe_text(title),
        subtitle="The first rows as the model sees them.",
        style=STYLE + OWN_STYLE,
        body="\n".join(map(_source, sources)),
    )
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path, temporary):
        temporary.write_text(page, encoding="utf-8", errors="replace")
        return temporary.replace(path)


def _source(source: ShownSource) -> str:
    lines = "<br>".join(safe_text(line) for line in source_lines(source))
    return section_html(safe_text(source.name), lines, [_row(row) for row in source.rows], "cards")


def _row(row: ShownRow) -> str:
    if row.error is not None:
        body = f'<p class="warning">cannot be used: {safe_text(row.error)}</p>'
    else:
        pictures = "".join(map(picture_html, row.pictures))
        facts = "".join(
            f'<tr class="{safe_text(name)}"><th>{safe_text(name)}</th><td>{safe_text(value)}</td></tr>'
            for name, value in row_facts(row).items()
        )
        body = (
            f'<div class="pictures">{pictures}</div><pre>{"".join(map(_span, row.spans))}</pre><table>{facts}</table>'
        )
    return f'<article class="card rollout"><h3>row {row.index}</h3>{body}</article>'


def _span(span: Span) -> str:
    kind = " learnt" if span.learnt else ""
    return f'<span class="{span.kind}{kind}">{safe_text(span.text)}</span>'
