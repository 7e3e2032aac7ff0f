"""Large documents: what portions make is what the whole text makes, and memory grows by little more than the text."""

import random
import re
import tracemalloc

import numpy as np
import pytest

from raymega.curate.document import CuratedDocument, DocumentWriter, read_curated
from raymega.curate.duplicates import exact, shingle_sets
from raymega.curate.options import Decontaminate, Exact, Lines, Near, Personal, Quality
from raymega.curate.spool import SetSpool, TableSpool
from raymega.curate.state import HEAD
from raymega.curate.steps.decontaminate import DecontaminateStep, hash_tasks
from raymega.curate.steps.mend import Mend
from raymega.curate.steps.personal import PersonalStep
from raymega.curate.steps.quality import QualityStep
from raymega.prepare.readers import long_text
from raymega.prepare.readers.long_text import LongText, TextBuilder, split_text
from tests.unit.curate.corpora import corpus_texts, curated, documents, prose

WIDE = "\U00020000\u3042\u00e9\u00a0 \r\n\x0b\u2028"


@pytest.fixture
def portions(monkeypatch):
    """Portions of a kilobyte, and long texts from there on."""
    for module in (
        "raymega.prepare.readers.long_text",
        "raymega.curate.steps.personal",
        "raymega.curate.steps.mend",
    ):
        monkeypatch.setattr(f"{module}.PORTION_BYTES", 1 << 10)
    for module in ("raymega.prepare.readers.long_text", "raymega.curate.document"):
        monkeypatch.setattr(f"{module}.LONG_BYTES", 1 << 10)
    monkeypatch.setattr("raymega.curate.tokens.BLOCK_CHARACTERS", 700)


def _text(seed=0, count=40):
    draw, pieces = random.Random(seed), list[str]()
    for text in prose()[:count]:
        text = re.sub(" ", lambda found: draw.choice([" ", " ", " ", "\n", "\n\n"]), text)
        pieces += [text, draw.choice(WIDE) * draw.randrange(4), " ".join("a b" for _ in range(20))]
        pieces.append(
            f"me{seed}@example.org 8.8.8.8 10.0.0.1 (555) 555-0123 caf\u00c3\u00a9 &amp; <b>.\n"
        )
    return "".join(pieces)


def _long(text):
    return LongText(text.encode())


def test_long_text_is_indexed_like_its_string(portions):
    text, draw = _text(), random.Random(1)
    long = _long(text)
    assert len(long) == len(text) and "".join(long.portions()) == text
    assert "".join(long.sections()) == text and long == _long(text) and long != _long(text[:-1])
    for _ in range(200):
        start, end = draw.randrange(len(text)), draw.randrange(len(text))
        assert long[start:end] == text[start:end]
    assert long[:7] == text[:7] and long[-9:] == text[-9:] and long[5:2] == ""


@pytest.mark.parametrize("space", ["", " \n" * 900, "\u3000" * 600])
def test_ends_are_stripped_like_those_of_a_string(portions, space):
    assert long_text.stripped(_long(f"{space}{_text()}{space}"))[:] == _text().strip()
    assert not len(long_text.stripped(_long(space + " ")))
    lone = f"{space}\ud800 a \udc00{space}"
    content = lone.encode("utf-8", "surrogatepass")
    assert LongText(content).stripped()[:] == lone.strip()


@pytest.mark.parametrize("pattern", ["\n", r"\n[ \t]*\n\s*"])
@pytest.mark.parametrize("filler", ["", "\n" * 3000, "x" * 5000])
def test_pieces_are_those_of_the_whole_text(portions, pattern, filler):
    text, pattern = f"{filler}{_text()}{filler}", re.compile(pattern)
    assert list(split_text(_long(text), pattern)) == pattern.split(text)
    assert list(long_text.split_lines(_long(text))) == text.splitlines()


STEPS = {
    "personal": lambda: PersonalStep(Personal()),
    "mend": Mend,
    "c4": lambda: QualityStep(Quality(rules=("c4",), needs_punctuation=False, refuses_brackets=False)),
    "decontaminate": lambda: DecontaminateStep(
        Decontaminate(tasks=("x",), max_pieces=999), hash_tasks([prose()[7], prose()[30]], 13)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_step_makes_of_portions_what_it_makes_of_the_whole(portions, name):
    for seed in range(3):
        text, step, found = _text(seed), STEPS[name](), []
        for each in (text, _long(text)):
            document = CuratedDocument(id="0" * 32, text=each, source="a@0")
            outcome = step.apply(document)
            found.append((outcome, document.text[:], document.reasons))
        assert found[0] == found[1] and found[0][0].reason
        assert isinstance(document.text, LongText)


@pytest.mark.parametrize("ignores_space", [False, True])
def test_key_is_that_of_the_whole_text(portions, ignores_space):
    options = Exact(ignores_space=ignores_space)
    for seed in range(3):
        text = _text(seed) + " \n" * 1500 + "End"
        key = exact.document_key(text, options)
        assert exact.document_key(_long(text), options) == key
        plain = " ".join(text.split()).casefold() if ignores_space else text
        assert key == exact._key(plain)


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_lines_are_taken_out_of_portions_as_of_the_whole(portions, unit):
    options, text = Lines(unit=unit), _text()
    count = len(list(exact.split_lines(text, options)))
    removed = sorted(random.Random(2).sample(range(count), count // 3))
    short, long = (exact.without_lines(each, removed, options) for each in (text, _long(text)))
    assert short[0][:] == long[0][:] and short[1] == long[1] and 0 < len(long[0]) < len(text)
    assert exact.without_lines(_long(text), range(count), options)[0] == ""


def test_shingles_of_ranges_are_those_of_the_whole(portions, monkeypatch):
    options, texts = Near(), [_text(), _text(1)]
    wholes = [shingle_sets.shingle_set(text, options) for text in texts]
    monkeypatch.setattr(shingle_sets, "PORTION_CHARACTERS", 900)
    sets = [list(shingle_sets.shingle_portions(_long(text), options)) for text in texts]
    assert len(sets[0]) > 20 and max(map(len, sets[0])) < 900
    for whole, found in zip(wholes, sets, strict=True):
        assert np.array_equal(np.concatenate(found), whole)
    expected = len(set(wholes[0].tolist()) & set(wholes[1].tolist())) / len(set(wholes[0].tolist()) | set(wholes[1].tolist()))  # fmt: skip
    first, second = (
        shingle_sets.SortedSet(size=sum(map(len, found)), portions=lambda found=found: iter(found))
        for found in sets
    )
    assert 0 < expected < 1 and shingle_sets.similarity(first, second) == expected


class Kept:
    """A state that keeps what is put."""

    def put_chunks(self, _, chunks):
        self.content = b"".join(chunks)


def test_spooled_table_has_the_rows_of_each_part_in_order(monkeypatch):
    monkeypatch.setattr("raymega.curate.spool.SPOOL_BYTES", 64)
    kind, numbers = np.dtype([("key", "<u8"), ("at", "<u4")]), np.random.default_rng(3)
    rows = np.zeros(500, dtype=kind)
    rows["key"], rows["at"] = numbers.integers(0, 1 << 40, 500), np.arange(500)
    parts, spool, state = (rows["key"] % 7).astype(np.int64), TableSpool(kind, 7), Kept()
    for start in range(0, 500, 60):
        spool.add(rows[start : start + 60], parts[start : start + 60])
    spool.write(state, "name")
    order = np.argsort(parts, kind="stable")
    head = np.searchsorted(parts[order], np.arange(8)).astype(HEAD)
    assert state.content == head.tobytes() + rows[order].tobytes()
    sets = SetSpool()
    sets.add(iter([np.arange(9, dtype=np.uint64), np.arange(9, 11, dtype=np.uint64)]))
    sets.add(iter([]))
    sets.write(state, "name")
    assert np.frombuffer(state.content, "<u8").tolist() == [2, 0, 11, 11, *range(11)]


def test_parquet_is_the_same_for_long_and_short_texts(portions):
    contents = []
    for make in (str, _long):
        with DocumentWriter() as writer:
            for seed, text in enumerate(["", _text(1), "short", _text(2)]):
                each = make(text) if len(text) > 99 else text
                writer.add(CuratedDocument(id=f"{seed:032x}", text=each, source="a@0"))
            contents.append(writer.close())
    assert contents[0] == contents[1]
    found = [each.text for each in read_curated(contents[0])]
    assert [text[:] for text in found] == ["", _text(1), "short", _text(2)]
    assert [isinstance(text, LongText) for text in found] == [False, True, False, True]


def test_builder_is_a_string_as_long_as_it_is_small(portions):
    builder = TextBuilder()
    builder.add("small")
    builder.add_slice(_long(_text()), 3, 8)
    assert builder.build() == "small" + _text()[3:8] and builder.build() == ""
    builder.add_slice(_long(_text()), 0, len(_text()))
    assert builder.build() == _long(_text())


def test_curation_of_long_texts_is_that_of_short_ones(without_ray, portions, monkeypatch, tmp_path):
    steps = ["mend", "personal", "exact", "near", "lines"]
    for number, text in enumerate([*corpus_texts()[:12], _text(1), _text(1) + "\nMore.", _text(1)]):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / f"in/{number:02}.txt").write_bytes(text.encode())
    long = documents(curated(tmp_path / "in", tmp_path / "long", steps))
    monkeypatch.setattr("raymega.prepare.documents.LONG_BYTES", 1 << 30)
    monkeypatch.setattr("raymega.prepare.readers.long_text.LONG_BYTES", 1 << 30)
    monkeypatch.setattr("raymega.curate.document.LONG_BYTES", 1 << 30)
    monkeypatch.setattr("raymega.curate.tasks.LONG_BYTES", 1 << 30)
    short = documents(curated(tmp_path / "in", tmp_path / "short", steps))
    assert any(isinstance(each.text, LongText) for each in long)
    assert not any(isinstance(each.text, LongText) for each in short)
    assert [(each.id, each.text[:]) for each in long] == [(each.id, each.text) for each in short]


def _peak(run):
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["near", "lines", "ignored", "personal", "c4"])
def test_memory_beside_a_text_does_not_grow_with_it(name, portions, monkeypatch):
    monkeypatch.setattr(shingle_sets, "PORTION_CHARACTERS", 1 << 16)
    monkeypatch.setattr("raymega.curate.tokens.BLOCK_CHARACTERS", 1 << 12)
    line = "Line {} of a text in which each line is another one.\n"

    def peak(count):
        text = _long("".join(line.format(number) for number in range(count)))
        runs = {
            "near": lambda: all(map(len, shingle_sets.shingle_portions(text, Near()))),
            "lines": lambda: all(line is not None for line in exact.split_lines(text, Lines())),
            "ignored": lambda: exact.document_key(text, Exact(ignores_space=True)),
            "personal": lambda: PersonalStep(Personal()).apply(_document(text)),
            "c4": lambda: QualityStep(Quality(rules=("c4",))).apply(_document(text)),
        }
        runs[name]()
        return _peak(runs[name]), text.num_bytes

    (small, small_bytes), (large, large_bytes) = peak(2000), peak(10_000)
    # A step that writes a text has it twice; strings of its lines would be three times it. Others would have one copy
    # or more. Between are the allocations of other threads of the process.
    allowed = 2.0 if name == "c4" else 0.5
    assert large - small < allowed * (large_bytes - small_bytes)


def _document(text):
    return CuratedDocument(id="0" * 32, text=text, source="a@0")
