"""Each step on texts whose outcome is known."""

import json

import numpy as np
import pytest

from raymega.curate.assets import read_assets
from raymega.curate.document import CuratedDocument, DocumentWriter, join_files, read_curated
from raymega.curate.options import Decontaminate, Language, Personal, Quality, QualityModel, Sample
from raymega.curate.recipe import StepSpec
from raymega.curate.rules import c4
from raymega.curate.rules.words import Words
from raymega.curate.steps.decontaminate import DecontaminateStep, hash_tasks, task_texts
from raymega.curate.steps.language import LanguageStep
from raymega.curate.steps.mend import Mend
from raymega.curate.steps.personal import PersonalStep
from raymega.curate.steps.quality import QualityStep
from raymega.curate.steps.quality_model import LinearModel, QualityModelStep, decode_model
from raymega.curate.steps.sample import SampleStep
from raymega.curate.steps.urls import UrlsStep
from raymega.curate.train_quality import QualityData, roc_auc, train_quality_model
from raymega.errors import ConfigError
from tests.unit.curate.corpora import prose

GOOD = (
    "The library of the town was built in the last century, and it has been open to all people since that time. "
    "It holds books on many subjects, with a large room for those who want to read. Visitors come to it every day. "
    "The staff have worked there for years. They know where each of the books is to be found. That is a great help."
)


def _document(text, **values):
    return CuratedDocument(**{"id": "0" * 32, "source": "a.txt@0"} | values, text=text)


def _run(step, text, **values):
    document = _document(text, **values)
    return step.apply(document), document


def test_mend_repairs_what_was_decoded_wrongly():
    outcome, document = _run(Mend(), "The caf\u00c3\u00a9 isn\u00e2\u20ac\u2122t open")
    assert document.text == "The caf\u00e9 isn\u2019t open" and document.reasons == ["mend"]
    assert not outcome.is_removed and "->" in outcome.shown
    assert not _run(Mend(), "na\u00efve caf\u00e9, \u4e2d\u6587")[0].reason
    # The comma, the exclamation mark and the space of Chinese and Japanese.
    wide = "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3000"
    assert _run(Mend(), f"{wide} caf\u00c3\u00a9")[1].text == f"{wide} caf\u00e9"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (GOOD.replace(" ", "\u00a0"), "en"),
        ("Die Bibliothek der Stadt wurde im letzten Jahrhundert gebaut und ist seither offen.", "de"),
        ("\u3053\u306e\u6587\u66f8\u306f\u30b7\u30b9\u30c6\u30e0\u306e\u4f7f\u3044\u65b9\u3092\u8aac\u660e\u3059\u308b", "ja"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["cascade", "fasttext"])
def test_language_is_found(text, language, engine):
    outcome, document = _run(LanguageStep(Language(engine=engine, keep=("en",))), text)
    assert document.language == language and document.scores["language"] > 0.3
    assert outcome.is_removed == (language != "en")


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (GOOD, ""),
        (GOOD[:200], "gopher few words"),
        ("\n".join(f"- {line}" for line in GOOD.split(". ") * 3), "gopher bullets"),
        (GOOD.replace(". ", "...\n"), "gopher lines that end in ellipses"),
        (GOOD + " # " * 30, "gopher hashes"),
        (" ".join(f"{at} 12:30" for at in range(400)) + GOOD, "gopher words without letters"),
        (
            "Bibliothek wurde gebaut Menschen kommen jeden Tag gerne wieder. " * 20,
            "gopher stop words",
        ),
        (f"{GOOD}\n\n{GOOD}\n\n{GOOD}", "gopher repeated paragraphs"),
        (GOOD + " one two three four five six seven." * 20, "gopher most frequent 4 words"),
        (GOOD.replace(". ", ".\n") + "\nAll { of } them.", "c4 curly bracket"),
        (GOOD.replace(".", ","), "c4 few sentences"),
        (GOOD + " Lorem ipsum is here.", "c4 lorem ipsum"),
    ],
)
def test_quality_rule_is_broken(text, broken):
    outcome, document = _run(QualityStep(Quality()), text)
    assert (outcome.reason, outcome.is_removed) == (broken, bool(broken))
    assert document.text == text


def test_fineweb_rules_and_their_limits():
    step = QualityStep(Quality(rules=("fineweb",)))
    ended, open_ended = (
        "This line ends as a sentence does.",
        "This line has nothing at its very end",
    )
    assert (
        _run(step, "\n".join([ended] + [f"{open_ended} {at}" for at in range(7)]))[0].reason == ""
    )
    assert (
        "end mark"
        in _run(step, "\n".join([ended] + [f"{open_ended} {at}" for at in range(9)]))[0].reason
    )
    assert "short" in _run(step, "\n".join(f"Short {at}." for at in range(9)))[0].reason
    assert "repeated" in _run(step, "\n".join([ended] * 4))[0].reason


def test_c4_removes_lines_and_keeps_the_rest():
    lines = [
        *GOOD.replace(". ", ".\n").split("\n"),
        "Menu",
        "Turn on JavaScript to see this.",
        "We use cookies here.",
    ]
    outcome, document = _run(QualityStep(Quality(rules=("c4",))), "\n".join(lines))
    assert outcome.reason == "c4 lines" and document.text == "\n".join(lines[:-3])
    assert c4.count_sentences("Mr. Smith came. He left, e.g. Tuesday. Why?") == 3


def test_other_languages_are_not_asked():
    assert not _run(QualityStep(Quality()), "kurz", language="de")[0].reason


def test_words_are_those_of_a_parser_of_english():
    words = Words("Don't (really) use well-known e.g. files; it's 3.5 times...").words
    assert words == [
        "Do", "n't", "(", "really", ")", "use", "well", "-", "known", "e.g.", "files", ";", "it", "'s", "3.5", "times", "...",
    ]  # fmt: skip


def test_rows_of_marks_take_time_by_their_length():
    # Hours, were it the square.
    for mark in "_=(":
        assert len(Words(mark * 300_000).words) == 300_000
    assert Words("a" * 3000 + ".").words == ["a" * 3000, "."]


def test_personal_data_are_masked():
    text = "Ask jo.doe+x@mail.example.org or +49 30 1234 5678 or (212) 555-0199, host 8.8.8.8, not 192.168.0.1, version 1.2.3.4.5"
    outcome, document = _run(PersonalStep(Personal()), text)
    assert document.text == (
        "Ask email@example.com or +1 202-555-0100 or +1 202-555-0100, host 192.0.2.1, not 192.168.0.1, version 1.2.3.4.5"
    )
    assert outcome.reason == "email, ip, phone"
    dates = "On 2024-11-26 at 10:30:00, ISBN 978-3-16-148410-0, pages 100-2000, 3.14159265"
    assert not _run(PersonalStep(Personal()), dates)[0].reason


@pytest.mark.parametrize("address", ["2606:4700::6810:84e5", "2a00::1", "2001:4860:4860::8888"])
def test_public_address_of_ipv6_is_masked(address):
    text = f"At {address}, not fd00::1:2, 2001:db8::1, 12:30:45 or Bad::Cafe::Face"
    outcome, document = _run(PersonalStep(Personal()), text)
    assert document.text == text.replace(address, "192.0.2.1") and outcome.reason == "ip"


def _decontaminate(tasks, **options):
    settings = Decontaminate(tasks=("tasks.txt",), **options)
    return DecontaminateStep(settings, hash_tasks(tasks, settings.words))


def test_task_text_is_cut_out_with_its_surroundings():
    task = " ".join(f"task{at}" for at in range(13))
    filler = " ".join(f"word{at}" for at in range(400))
    step = _decontaminate([task])
    outcome, document = _run(step, f"{filler[:1500]} {task.upper()}, {filler[1500:]}")
    assert outcome.reason == "task text, cut out" and "TASK" not in document.text
    assert len(document.text) == pytest.approx(len(filler) - 400, abs=8)
    # Twelve words are no hit, and what is left of a short text is removed.
    assert not _run(step, f"{filler} {task.rpartition(' ')[0]} {filler}")[0].reason
    assert _run(step, f"{filler[:300]} {task}")[0].is_removed


def test_document_in_too_many_pieces_is_removed():
    task, filler = " ".join(f"task{at}" for at in range(13)), "word " * 200
    assert not _run(_decontaminate([task]), f"{filler} {task} " * 9 + filler)[0].is_removed
    assert _run(_decontaminate([task]), f"{filler} {task} " * 11)[0].is_removed


def test_strings_of_json_and_lines_of_text_are_tasks():
    row = json.dumps({"question": "a b", "choices": ["c", {"text": "d"}], "answer": 3})
    assert list(task_texts("x.jsonl", f"{row}\n\n")) == ["a b", "c", "d"]
    assert list(task_texts("x.txt", "a\nb")) == ["a\nb", "a", "b"]
    assert list(task_texts("x.jsonl", '{"q": "a\u2028b"}')) == ["a\u2028b"]
    # of JSON as text the escapes would be letters of the words beside them
    whole = json.dumps({"data": [{"q": "caf\u00e9\nb"}]}, indent=1)
    assert list(task_texts("x.json", whole)) == ["caf\u00e9\nb"]
    assert list(task_texts("x.json", f"{row}\n{row}\n")) == ["a b", "c", "d"] * 2


def test_files_that_are_no_tasks_or_models_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("one two three")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    np.save("array.npy", np.zeros(3))
    for name, options in (
        ("decontaminate", Decontaminate(tasks=("short.txt",))),
        ("quality_model", QualityModel(model="cut.npz")),
        ("quality_model", QualityModel(model="array.npy")),
    ):
        with pytest.raises(ConfigError, match=r"short\.txt|cut\.npz|array\.npy"):
            read_assets([StepSpec(name=name, options=options)])


def test_unknown_language_is_refused():
    with pytest.raises(ConfigError, match="has english, EN, which"):
        LanguageStep(Language(keep=("english", "EN", "no", "zu")))
    with pytest.raises(ConfigError, match="has zu, which"):
        LanguageStep(Language(keep=("zu",), engine="fasttext"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://bad.example.org/page", "domain"), ("http://example.org", ""), ("https://WWW.other.net/ads/1", "address"),
        ("https://other.net/news", ""), ("http://spam.com/a", ""), ("http://a.spam.co/b", "domain"), ("", ""), ("http://[bad", ""),
    ],
)  # fmt: skip
def test_listed_addresses_are_removed(url, reason):
    step = UrlsStep(
        ["# a comment", "bad.example.org", "https://other.net/ads/", "http://spam.co", ""]
    )
    assert _run(step, "text", url=url)[0].reason == reason


def test_sample_keeps_a_share_by_source():
    step = SampleStep(Sample(rate=0.5, sources={"*/forum/*": 0.0, "*/books/*": 1.0}))
    kept = [
        not _run(step, "", id=f"{at:032x}", source="x/web/a@1")[0].is_removed for at in range(1000)
    ]
    assert 450 < sum(kept) < 550
    assert _run(step, "", source="x/forum/a@1")[0].is_removed
    assert not _run(step, "", source="x/books/a@1")[0].is_removed


def test_pareto_draw_keeps_by_the_score():
    kept = {}
    for bias in (-9.0, 0.0, 9.0):
        model = LinearModel(weights=np.zeros(1 << 18, dtype=np.float32), bias=bias)
        step = QualityModelStep(QualityModel(model="x"), model.encode())
        outcomes = [_run(step, "text", id=f"{at:032x}")[0] for at in range(2000)]
        kept[bias] = np.mean([not outcome.is_removed for outcome in outcomes])
    # P(draw > 1 - score) = (2 - score) ** -9.
    assert kept[9.0] > 0.99
    assert kept[0.0] == pytest.approx(1.5**-9, abs=0.01)
    assert kept[-9.0] == pytest.approx(2**-9, abs=0.005)


@pytest.mark.parametrize("alpha", [1e-300, 0.001, 0.5, 1e300])
def test_pareto_draw_of_any_shape_is_one_of_the_score(alpha):
    model = LinearModel(weights=np.zeros(1 << 18, dtype=np.float32), bias=0.0)
    step = QualityModelStep(QualityModel(model="x", pareto_alpha=alpha), model.encode())
    outcomes = [_run(step, "text", id=f"{at * 2**118:032x}")[0] for at in range(300)]
    kept = np.mean([not outcome.is_removed for outcome in outcomes])
    assert kept == pytest.approx(1.5**-alpha, abs=0.1)


def test_trained_model_tells_prose_from_code(tmp_path):
    texts = {
        "good": prose(),
        "raw": [f"x{at} = [{at}, {at + 1}] # {'%' * at}\n" * 5 for at in range(150)],
    }
    for name, rows in texts.items():
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    data = QualityData(good=(str(tmp_path / "good.jsonl"),), raw=(str(tmp_path / "raw.jsonl"),))
    found = train_quality_model(data, str(tmp_path / "model.npz"), on_progress=lambda *_: None)
    assert found["roc_auc"] > 0.99 and found["held_out_documents"] > 10
    model = decode_model((tmp_path / "model.npz").read_bytes())
    assert model.score(GOOD) > 0.5 > model.score("x = [1, 2] # %%")
    first = (tmp_path / "model.npz").read_bytes()
    train_quality_model(data, str(tmp_path / "model.npz"), on_progress=lambda *_: None)
    assert (tmp_path / "model.npz").read_bytes() == first


def test_output_that_is_a_folder_is_refused_before_anything_is_read(tmp_path):
    data = QualityData(good=("nowhere",), raw=("nowhere",))
    with pytest.raises(ConfigError, match="it is a folder"):
        train_quality_model(data, str(tmp_path), on_progress=lambda *_: None)


def test_area_under_the_curve():
    truth = np.array([1.0, 1.0, 0.0, 0.0])
    assert roc_auc(np.array([4.0, 3.0, 2.0, 1.0]), truth) == 1
    assert roc_auc(np.array([1.0, 1.0, 1.0, 1.0]), truth) == 0.5
    assert roc_auc(np.array([4.0, 1.0, 2.0, 3.0]), truth) == 0.5


def test_documents_are_the_same_after_parquet():
    first = _document(
        "a\n\u4e2d", url="http://x", language="en", scores={"b": 2.0, "a": 1.0}, reasons=["mend"]
    )
    files = []
    for documents in ([first], [_document("b")], []):
        with DocumentWriter() as writer:
            for document in documents:
                writer.add(document)
            files.append(writer.close())
    assert list(read_curated(join_files(files))) == [first, _document("b")]
