"""English of the code and the pages: what tests.support.english finds, and the figures that the project keeps."""

import ast
from pathlib import Path

import pytest

from tests.support import english

ROOT = Path(__file__).parents[2]
FOLDERS = ("raymega", "benchmarks", "cluster", "tests/support", "tests/docs", "tests/cuda_books")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
GENERATED = ("job-file.md",)
MIN_COMMENTS_A_100_LINES = 3
MAX_WORDS, MAX_MEAN_SENTENCE, LONG_SENTENCE, MAX_LONG_SHARE = 2000, 18, 30, 0.1


def test_docstrings_have_a_subject_and_say_things_plainly():
    docs = [doc for path in SOURCES for doc in english.docstrings(path)]
    assert len(docs) > 3000
    assert [fault for doc in docs for fault in english.faults_of_docstring(doc)] == []


def test_comments_have_no_banned_phrase():
    assert [fault for path in SOURCES for fault in english.faults_of_comments(path)] == []


def test_messages_have_no_banned_phrase():
    """Each text of the package that is no docstring."""
    texts = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.value)
        for path in SOURCES
        if path.is_relative_to(ROOT / "raymega")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [
        (place, phrase) for place, text in texts for phrase in english.banned_phrases(text)
    ] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_has_comments_where_a_reader_gets_lost(folder):
    counts = [
        english.comments_and_lines(path) for path in SOURCES if path.is_relative_to(ROOT / folder)
    ]
    comments, lines = (sum(each) for each in zip(*counts, strict=True))
    assert 100 * comments / lines >= MIN_COMMENTS_A_100_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short_and_so_are_their_sentences(page):
    text = page.read_text(encoding="utf-8")
    words = english.sentences(text)
    assert page.name in GENERATED or len(text.split()) <= MAX_WORDS
    assert sum(words) / len(words) < MAX_MEAN_SENTENCE
    assert sum(n > LONG_SENTENCE for n in words) < MAX_LONG_SHARE * len(words)


@pytest.mark.parametrize(
    "text",
    [
        "What the step needs.",
        "Of the run.",
        "It is closed but while collecting.",
        'Return x.\n\nArgs:\n    seed: Of the run.\n    x: [T, D].',
        "Return how many steps went on.",
        "Return " + "a word and " * 15 + "the end.",
    ],
    ids=["relative", "preposition", "pronoun", "argument", "phrase", "long"],
)  # fmt: skip
def test_riddles_are_found(text):
    doc = english.Docstring(path=Path("some.py"), line=1, text=text)
    assert len(list(english.faults_of_docstring(doc))) == 1


def test_plain_docstrings_are_left_alone():
    text = "Return the gradient for autograd.\n\nArgs:\n    seed: Seed of the run's data order.\n    is_on: Whether to log."
    doc = english.Docstring(path=Path("some.py"), line=1, text=text)
    assert list(english.faults_of_docstring(doc)) == []
