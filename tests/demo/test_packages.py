"""Packages are downloaded by pip, once, and only with the pinned hash."""

import hashlib
import socket
import sys
import zipfile
from dataclasses import replace

import pytest

from dataproto.errors import InvalidConfig
from recipes.data.packages import Package, digest, fetch

pytestmark = pytest.mark.slow  # pip is a process
ABOUT = ("words by nobody", "MIT", "https://example.org")


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Package("some-words", "1.0", file.name, digest(file), *ABOUT)


def test_a_wheel_is_downloaded_once(wheel, tmp_path, monkeypatch):
    path = fetch(wheel)
    assert zipfile.ZipFile(path).read("some_words/words.txt") == b"real words"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(wheel) == path
    path.write_bytes(b"something else")
    with pytest.raises(
        InvalidConfig, match=r"could not download some-words==1.0 .*put some_words-1.0-py3-none-any.whl"
    ):
        fetch(wheel)


def test_a_damaged_file_without_a_network_is_named(wheel, tmp_path, monkeypatch):
    path = fetch(wheel)
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidConfig, match=r"some_words-1.0-py3-none-any.whl is damaged, and pip could not download"):
        fetch(wheel)


def test_a_cache_that_cannot_be_written_is_named_with_what_chose_it(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        InvalidConfig, match=r"some_words.* neither used nor replaced .*: set XDG_CACHE_HOME to a directory"
    ):
        fetch(wheel)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ERROR: Exception:\nTraceback ...\nOSError: [Errno 28] No space left on device",
            r"No space left on device\): make room in .*cache/dataproto, set XDG_CACHE_HOME to a directory",
        ),
        ("/bin/python: No module named pip", "no pip: python -m ensurepip installs it"),
    ],
)
def test_what_pip_says_in_its_last_line_is_told(said, told, wheel, tmp_path, monkeypatch):
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(2)"
    monkeypatch.setattr(Package, "command", lambda self, folder: [sys.executable, "-c", script])
    with pytest.raises(InvalidConfig, match=told) as error:
        fetch(wheel)
    assert "Exception:" not in str(error.value)


def test_without_a_network_pip_could_not_connect(wheel, tmp_path, monkeypatch):
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
        with pytest.raises(
            InvalidConfig, match=r"\(it could not connect: .*refused\): connect to a package index, or put"
        ):
            fetch(wheel)


def test_another_content_is_refused(wheel, tmp_path):
    other = replace(wheel, sha256=hashlib.sha256(b"another file").hexdigest())
    with pytest.raises(InvalidConfig, match=r"could not download some-words==1.0"):
        fetch(other)
    assert list((tmp_path / "cache" / "dataproto").iterdir()) == []


def test_the_licence_is_in_the_notice(wheel):
    assert wheel.notice == "words by nobody, from some-words 1.0, MIT (https://example.org)"
