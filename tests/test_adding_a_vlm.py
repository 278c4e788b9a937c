"""`docs/adding_a_vlm.md` quotes the source as it is, and leaves out no field."""

import re
from dataclasses import fields
from pathlib import Path

from dataproto.vlm import VLMFamily
from dataproto.vlm.media_layout import Pictures

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "adding_a_vlm.md").read_text()


def test_its_code_stands_in_the_files_it_names():
    quoted = re.findall(r"^```python (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 4
    for path, code in quoted:
        assert code in (ROOT / path).read_text(), f"{path} no longer holds:\n{code}"
    assert TEXT.count("```python") == len(quoted)


def test_every_field_and_method_is_told():
    methods = [name for name in vars(Pictures) if not name.startswith("_")]
    assert len(methods) == 7
    missing = [name for name in (*(field.name for field in fields(VLMFamily)), *methods) if f"`{name}`" not in TEXT]
    assert missing == []


def test_it_fits_a_page():
    assert len(TEXT.splitlines()) < 120


def test_files_that_it_names_exist():
    named = set(re.findall(r"`((?:dataproto|tests|workers|rollout)/[\w/]+\.py)`", TEXT))
    assert len(named) >= 4
    assert all((ROOT / path).is_file() for path in named), named
