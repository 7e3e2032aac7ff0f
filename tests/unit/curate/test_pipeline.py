"""A curation as a whole: what is removed, the same bytes however it ran, and what is refused."""

import json
import signal
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from raymega.curate import pipeline
from raymega.curate.checks import claim
from raymega.curate.state import State
from raymega.errors import ConfigError
from raymega.prepare.options import PrepareOptions
from raymega.prepare.output import FolderOutput
from raymega.prepare.pipeline import prepare
from raymega.prepare.sources import list_files
from tests.unit.curate.corpora import (
    FOOTER,
    content,
    corpus_texts,
    curated,
    documents,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture(scope="module")
def texts():
    return corpus_texts()


@pytest.fixture
def corpus(tmp_path, texts):
    write_corpus(tmp_path / "corpus", texts)
    return tmp_path / "corpus"


def _steps(done):
    return {step["name"]: step for step in done.counts["steps"]}


def test_each_copy_goes_and_no_other_text(corpus, tmp_path, texts):
    done = curated(corpus, tmp_path / "out", ["exact"])
    left = documents(done)
    assert Counter(each.text for each in left) == dict.fromkeys(texts, 1)
    assert _steps(done)["exact"]["documents_in"] == len(texts)
    # Of copies the one with the smallest id is left: the ids of all are those of a run without the step.
    every = documents(curated(corpus, tmp_path / "every", ["mend"]))
    smallest = {text: min(each.id for each in every if each.text == text) for text in set(texts)}
    assert {each.text: each.id for each in left} == smallest


def test_near_duplicates_go_and_the_others_stay(corpus, tmp_path, texts):
    done = curated(corpus, tmp_path / "out", ["exact", "near"])
    left = [each.text for each in documents(done)]
    pairs = [(text, near) for near in set(texts) if "One more line, number" in near
             for text in set(texts) if near.startswith(text.removesuffix(FOOTER)) and near != text]  # fmt: skip
    assert len(pairs) > 5
    assert all((text in left) + (near in left) <= 1 for text, near in pairs if len(text) > 500)
    assert len(_steps(done)["near"]["examples"]) > 2


def test_line_that_all_have_stays_once(corpus, tmp_path):
    done = curated(corpus, tmp_path / "out", ["lines"])
    assert sum(FOOTER in each.text for each in documents(done)) == 1
    assert any("lines: " in reason for each in documents(done) for reason in each.reasons)


def test_bytes_are_the_same_in_any_order_of_inputs_and_tasks(corpus, tmp_path, monkeypatch):
    first = curated(corpus, tmp_path / "first")
    expected = content(first.uri)
    assert first.files and not first.is_cached
    # Tasks in reverse, as on other numbers of CPUs, and the files as inputs of their own.
    monkeypatch.setattr(pipeline, "on_cluster", lambda items, run: map(run, items[::-1]))
    assert content(curated(corpus, tmp_path / "second").uri) == expected
    files = sorted(corpus.iterdir())
    assert content(curated(files, tmp_path / "third").uri) == content(
        curated(files[::-1], tmp_path / "fourth").uri
    )
    again = curated(corpus, tmp_path / "first")
    assert again.is_cached and again.counts == first.counts


def test_output_has_parquet_alone_at_its_top_and_feeds_prepare(corpus, tmp_path, monkeypatch):
    done = curated(corpus, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "_report",
        "_state",
        *done.files,
    ]
    page = (tmp_path / "out/_report/report.html").read_text()
    assert "What each step took" in page and page.isascii()
    _check_page(page, done)
    monkeypatch.setattr("raymega.prepare.pipeline.on_cluster", lambda items, run: map(run, items))
    monkeypatch.setattr("raymega.prepare.pipeline.session_at", pipeline.session_at)
    options = PrepareOptions(inputs=(done.uri,), out=str(tmp_path / "tokens"), tokenizer="bytes")
    meta = prepare(options, on_progress=lambda *_: None).meta
    assert sum(split.num_documents for split in meta.splits.values()) == len(documents(done))


def _check_page(page, done):
    """Every element ends where it should, and each step has its row, its bar and its examples."""
    parsed = Page()
    parsed.feed(page)
    parsed.close()
    assert not parsed.open and not parsed.crossed
    for step in done.counts["steps"]:
        assert parsed.texts.count(step["name"]) >= (3 if step["reasons"] else 2)
        assert f"{step['documents_in']:,}" in parsed.texts
        assert len(step["examples"]) == min(sum(step["reasons"].values()), 20)


class Page(HTMLParser):
    """Texts of a page, and elements that are open at its end or end inside another."""

    def __init__(self):
        super().__init__()
        self.open, self.crossed, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        self.texts.append(data.strip())


@pytest.mark.parametrize("number", [2, pytest.param(10, marks=pytest.mark.wide)])
def test_curation_that_is_killed_continues_to_the_same_bytes(number, corpus, tmp_path):
    expected = content(curated(corpus, tmp_path / "undisturbed").uri)
    command = [
        "-m",
        "tests.unit.curate.killed",
        str(corpus),
        str(tmp_path / "out"),
        str(number),
        "5",
    ]
    told = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(lines) == number and {line["signal"] for line in lines} == {signal.SIGKILL}, (
        told.stderr
    )
    for line in lines:
        assert content(curated(corpus, line["out"]).uri) == expected


def test_finished_groups_are_not_done_again(corpus, tmp_path, monkeypatch):
    ran, run_group = [], pipeline.run_group

    def count(task, **options):
        ran.append(task.name)
        if len(ran) == 5:
            raise KeyboardInterrupt
        return run_group(task, **options)

    monkeypatch.setattr(pipeline, "run_group", count)
    with pytest.raises(KeyboardInterrupt):
        curated(corpus, tmp_path / "out", ["mend"])
    curated(corpus, tmp_path / "out", ["mend"])
    # The group that was interrupted alone ran twice.
    assert [name for name, times in Counter(ran).items() if times > 1] == [ran[4]]


def test_curation_that_is_killed_continues_by_the_names_of_its_inputs_now(
    corpus, tmp_path, monkeypatch
):
    """The source of each document, by which shares are drawn, has the input as it is given."""
    monkeypatch.chdir(corpus.parent)
    steps, run_group, ran = [{"sample": {"sources": {"*/*": 0.3}}}, "exact"], pipeline.run_group, []

    def stop(task, **options):
        ran.append(task)
        if len(ran) == 5:
            raise KeyboardInterrupt
        return run_group(task, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "run_group", stop)
        with pytest.raises(KeyboardInterrupt):
            curated(f"./{corpus.name}", tmp_path / "out", steps)
    done = curated(corpus, tmp_path / "out", steps)
    assert {each.source.rpartition("/")[0] for each in documents(done)} == {str(corpus)}
    assert content(done.uri) == content(curated(corpus, tmp_path / "fresh", steps).uri)


@pytest.mark.parametrize("steps", [["exact"], ["near"], ["lines"], ["mend"]], ids=str)
@pytest.mark.parametrize("compared_bytes", [20_000, 1 << 30], ids=["parts", "one-part"])
def test_file_that_comes_while_a_corpus_is_unfinished_is_part_of_it(
    steps, compared_bytes, corpus, tmp_path, texts, monkeypatch
):
    monkeypatch.setattr(pipeline, "COMPARED_BYTES", compared_bytes)
    write_part = pipeline._write_part

    def stop(*args, **options):
        write_part(*args, **options)
        raise KeyboardInterrupt

    # All is done but the record when the new file comes; it moves the numbers of all groups.
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_write_part", stop)
        with pytest.raises(KeyboardInterrupt):
            curated(corpus, tmp_path / "out", steps)
    lines = "".join(json.dumps({"text": f"New. {text}"}) + "\n" for text in [*texts, *texts[:9]])
    (corpus / "0.jsonl").write_text(lines)
    done = curated(corpus, tmp_path / "out", steps)
    assert content(done.uri) == content(curated(corpus, tmp_path / "fresh", steps).uri)


def test_unfinished_corpus_is_not_read(corpus, tmp_path, monkeypatch):
    write_part, out = pipeline._write_part, tmp_path / "corpora/out"

    def stop(*args, **options):
        write_part(*args, **options)
        raise KeyboardInterrupt

    out.parent.mkdir()
    monkeypatch.setattr(pipeline, "PART_BYTES", 2000)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_write_part", stop)
        with pytest.raises(KeyboardInterrupt):
            curated(corpus, out, ["exact"])
    (part,) = out.glob("*.parquet")
    for name in (out, out.parent, part):
        with pytest.raises(ConfigError, match="has not finished"):
            list_files([str(name)], include=["*"], exclude=[])
    # Other files of the folder around it are read.
    (out.parent / "a.md").write_text("a text")
    files = list_files([str(out.parent)], include=["*.md"], exclude=[])
    assert [file.name for file in files] == ["a.md"]
    (out.parent / "a.md").unlink()
    # What a killed process was writing does not stay either.
    (out / ".partial").mkdir(exist_ok=True)
    (out / ".partial/0123").write_bytes(b"a")
    done = curated(corpus, out, ["exact"])
    assert len(done.files) > 1 and not (out / ".partial").exists()
    for name in (out, out.parent):
        files = list_files([str(name)], include=["*"], exclude=["*.yaml"])
        assert [Path(file.path).name for file in files] == list(done.files)


def test_dataset_in_the_making_is_not_taken_for_a_corpus(corpus, tmp_path):
    FolderOutput(folder=tmp_path / "out").claim({"inputs": ""})
    with pytest.raises(ConfigError, match="not empty and is no corpus"):
        curated(corpus, tmp_path / "out", ["exact"])
    claim(State(uri=str(tmp_path / "other")), {})
    with pytest.raises(ConfigError, match="is not empty and is no dataset"):
        FolderOutput(folder=tmp_path / "other").claim({"inputs": ""})


def test_inputs_without_text_are_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match="all empty"):
        curated(tmp_path / "a.txt", tmp_path / "out", ["near"])


def test_bad_line_is_refused_and_all_else_kept(corpus, tmp_path):
    (corpus / "c.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"c\.jsonl@0 has no document"):
        curated(corpus, tmp_path / "out", ["exact"])
    assert not list((tmp_path / "out").glob("*.parquet"))
    done = curated(corpus, tmp_path / "out", ["exact"], max_bad_lines=1)
    assert done.counts["bad_lines"] == 1


def test_finished_corpus_of_another_recipe_is_refused(corpus, tmp_path):
    curated(corpus, tmp_path / "out", ["exact"])
    with pytest.raises(ConfigError, match="corpus of another recipe"):
        curated(corpus, tmp_path / "out", ["exact", "near"])


def test_output_in_use_is_refused(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and is no corpus"):
        curated(corpus, tmp_path / "out", ["exact"])


def test_pages_need_the_step_extract(tmp_path):
    (tmp_path / "a.html").write_text(
        "<html><body><main><p>A page with words in it.</p></main></body></html>"
    )
    with pytest.raises(ConfigError, match="the recipe has no step extract"):
        curated(tmp_path / "a.html", tmp_path / "out", ["exact"])
    (document,) = documents(curated(tmp_path / "a.html", tmp_path / "out", ["extract", "exact"]))
    assert document.text.strip() == "A page with words in it."
