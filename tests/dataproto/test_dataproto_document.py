"""The document about `DataProto`: its code runs."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "dataproto.md"


def test_the_code_of_the_document_runs(tmp_path):
    text = DOCUMENT.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 9
    lines = [""] * text.count("\n")
    for block in blocks:  # at their places, so that an error names the document's line
        start = text[: block.start(1)].count("\n")
        lines[start : start + block[1].count("\n")] = block[1].splitlines()
    program = tmp_path / "dataproto_md.py"
    program.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=DOCUMENT.parents[1])
    assert done.returncode == 0, done.stderr
