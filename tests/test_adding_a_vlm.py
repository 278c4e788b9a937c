"""`docs/adding_a_vlm.md` quotes the source literally, and names every attribute and method that a family may override."""

import re
from pathlib import Path

from dataproto.vlm import MediaLayout, VLMFamily

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "adding_a_vlm.md").read_text()


def test_its_code_stands_in_the_files_it_names():
    quoted = re.findall(r"^```python (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 4
    for path, code in quoted:
        assert code in (ROOT / path).read_text(), f"{path} no longer holds:\n{code}"
    assert TEXT.count("```python") == len(quoted) + 1  # and the example of a package


def test_every_attribute_and_method_is_named():
    methods = [name for name in vars(MediaLayout) if not name.startswith("_")]
    assert len(methods) == 14
    told = {name for part in VLMFamily.__mro__[:-1] for name in (*vars(part), *part.__annotations__)}
    missing = [name for name in (*sorted(told), *methods) if not name.startswith("_") and f"`{name}`" not in TEXT]
    assert missing == []


def test_it_fits_a_page():
    assert len(TEXT.splitlines()) < 185


def test_files_that_it_names_exist():
    named = set(re.findall(r"`((?:dataproto|tests|workers|rollout)/[\w/]+\.py)`", TEXT))
    assert len(named) >= 4
    assert all((ROOT / path).is_file() for path in named), named
