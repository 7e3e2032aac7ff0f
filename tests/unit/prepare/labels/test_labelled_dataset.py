"""Datasets of labelled texts: from rows to the labels of packed rows, and what is refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from raymega.config.heads.section import HeadSection
from raymega.data.arrow import TokenStream
from raymega.data.checks import training_faults
from raymega.data.format import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from raymega.data.heads.checks import label_faults
from raymega.data.inspect import describe_packing
from raymega.data.open_split import Shape, labels_of, open_split
from raymega.data.rows import ANSWERS, RowForm, value_of
from raymega.errors import ConfigError, DataError
from raymega.prepare.chat.rows import DEFAULT_KEYS
from raymega.prepare.labels.documents import labelled_documents
from raymega.prepare.labels.rows import labelled_text
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.prepare.tokenizer.encoder import Encoder, EncodingRules
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.unit.prepare.chat import templates

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")

CLASSES = [{"text": f"text {n} " * (n % 4 + 1), "label": n % 3} for n in range(12)]
QUESTIONS = [
    {"context": f"page {n}", "question": "which?", "choices": ["a", "bb", "ccc"], "label": n % 3}
    for n in range(9)
]
MATCHES = [{"anchor": f"question {n}?", "positive": f"answer {n}."} for n in range(7)]
WORDS = [{"tokens": ["ab", "c", "dd"], "tags": [1, -100, n % 2]} for n in range(5)]
TAGGED = [{"tokens": ["ab", "c"], "tags": [n % 3, -100]} for n in range(6)]
ANSWERED = [{"prompt": f"q{n}?", "completion": f"yes {n}.", "label": n % 2 == 0} for n in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / TOKENIZER_FILE).write_text(templates.make_tokenizer().to_str())
    (folder / "chat_template.jinja").write_text(templates.CHATML)
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings))
    return folder


def _prepare(folder, model, rows, row_format, **more):
    if not (folder / "in").exists():
        (folder / "in").mkdir(parents=True)
        (folder / "in" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareOptions(
        inputs=(str(folder / "in"),), out=str(folder / "out"), tokenizer=str(model), row_format=row_format,
        text_key=DEFAULT_KEYS[row_format], valid_fraction=0, **more,
    )  # fmt: skip
    return prepare(options, on_progress=lambda *_: None).meta


def _rows(folder, form, seq_len=64, **more):
    shape = Shape(seq_len=seq_len, packing="best_fit", window=4, multiple=4, form=form, **more)
    source = open_split(str(folder / "out"), "train", shape, seed=0)
    return [source.row(index) for index in range(source.num_windows)]


def _texts(row):
    """The text of each document of a row, without its padding."""
    tokenizer, starts = templates.make_tokenizer(), np.cumsum([0, *row.documents])
    return [
        tokenizer.decode(row.tokens[at : at + n].tolist(), skip_special_tokens=True)
        for at, n in zip(starts, row.lengths, strict=False)
    ]


def test_texts_have_their_class_in_packed_rows(tmp_path, model):
    meta = _prepare(tmp_path, model, CLASSES, "classification")
    assert (meta.version, meta.row_format) == (3, "classification")
    rows = _rows(tmp_path, RowForm("classes", 1, 3))
    found = {text: int(label) for row in rows for text, label in zip(_texts(row), row.classes, strict=True)}  # fmt: skip
    assert found == {row["text"]: row["label"] for row in CLASSES}
    assert any(len(row.classes) > 1 for row in rows), "rows of several documents"


def test_a_text_that_is_cut_keeps_its_class(tmp_path, model):
    _prepare(tmp_path, model, CLASSES, "classification")
    rows = _rows(tmp_path, RowForm("classes", 1, 3), seq_len=8)
    assert sorted(int(label) for row in rows for label in row.classes) == sorted([0, 1, 2] * 4)


def test_texts_have_their_number_also_where_they_are_cut(tmp_path, model):
    values = [3.7, -0.25, 1e-3, 5.0]
    rows = [
        {"text": f"text {n} of several words", "label": value} for n, value in enumerate(values)
    ]
    _prepare(tmp_path, model, rows, "regression")
    for seq_len in (64, 8):
        found = [
            value for row in _rows(tmp_path, RowForm("values", 1), seq_len) for value in row.classes
        ]
        assert sorted(found) == sorted(float(np.float32(value)) for value in values)


def test_a_number_is_whole_where_an_encoder_cuts_a_text_to_fewer_tokens(tmp_path, model):
    value = 3.1328125  # of three bytes
    meta = _prepare(tmp_path, model, [{"text": "ab", "label": value}], "regression")
    assert meta.splits["train"].num_tokens == 3
    form = RowForm("values", 1, is_causal=False)
    shape = Shape(seq_len=8, packing="best_fit", window=4, multiple=2, form=form)
    (row,) = [open_split(str(tmp_path / "out"), "train", shape, seed=0).row(0)]
    assert (row.lengths, row.classes.tolist()) == ((2,), [value])


def test_a_number_of_more_digits_than_a_text_has_tokens_is_refused():
    encoder = Encoder(byte_tokenizer(), EncodingRules(eod_id=6))
    text, _ = labelled_text({"text": "a", "label": 0.5}, "regression", "text")
    found = labelled_documents(text, "regression", encoder.ids, encoder.placed, bos_id=-1, eod_id=6)
    assert value_of(found[0].targets) == 0.5
    text, _ = labelled_text({"text": "a", "label": 3.7}, "regression", "text")
    with pytest.raises(DataError, match="has 2 tokens"):
        labelled_documents(text, "regression", encoder.ids, encoder.placed, bos_id=-1, eod_id=6)


def test_texts_that_match_stay_beside_each_other(tmp_path, model):
    meta = _prepare(tmp_path, model, MATCHES, "embedding")
    rows = _rows(tmp_path, RowForm("matches", 2))
    texts = [text for row in rows for text in _texts(row)]
    assert dict(zip(texts[::2], texts[1::2], strict=True)) == {
        row["anchor"]: row["positive"] for row in MATCHES
    }
    assert sum(row.num_pairs for row in rows) == len(MATCHES)
    assert all(not row.classes.any() for row in rows)
    shape = Shape(seq_len=64, packing="best_fit", window=4, multiple=4)
    assert describe_packing(str(tmp_path / "out"), meta, shape)["train"]["rows"] == len(rows)


def test_choices_of_a_question_stay_together_with_the_right_one(tmp_path, model):
    _prepare(tmp_path, model, QUESTIONS, "multiple_choice")
    rows, found = _rows(tmp_path, RowForm("choices", 3), seq_len=128), {}
    for row in rows:
        texts = _texts(row)
        for number, right in enumerate(row.classes):
            found[texts[3 * number].split("\n")[0]] = texts[3 * number + right].split("\n")[-1]
    assert found == {row["context"]: row["choices"][row["label"]] for row in QUESTIONS}


def test_first_token_of_a_word_has_its_class(tmp_path, model):
    _prepare(tmp_path, model, WORDS, "token_classification")
    tokenizer, seen = templates.make_tokenizer(), []
    for row in _rows(tmp_path, RowForm("tokens", 1, 2)):
        for at in np.flatnonzero(row.mask):
            # a space may be a token of its own
            begin = tokenizer.decode(row.tokens[at : at + 2].tolist()).strip()
            seen.append((begin[0], int(row.labels[at])))
    words = [each for row in WORDS for each in zip(row["tokens"], row["tags"], strict=True)]
    assert sorted(seen) == sorted((word[0], tag) for word, tag in words if tag >= 0)


def _prefixed():
    """A tokenizer that puts a space before a text, as Llama 2's."""
    words = {
        "<unk>": 0,
        "\u2581": 1,
        "\u2581ab": 2,
        "\u2581c": 3,
        "\u2581dd": 4,
        "ab": 5,
        "<|endoftext|>": 6,
    }
    made = Tokenizer(models.BPE({**words, **{c: 7 + n for n, c in enumerate("abcd")}}, [("a", "b"), ("\u2581", "ab"), ("\u2581", "c")], unk_token="<unk>"))  # fmt: skip
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


@pytest.mark.parametrize("name", ["bytes", "prefixed"])
def test_a_class_lies_at_the_first_letter_of_a_word_not_at_the_space_before(name):
    """A causal model has not read the word at the space before."""
    source = byte_tokenizer() if name == "bytes" else _prefixed().to_str()
    encoder, words = Encoder(source, EncodingRules(eod_id=6)), ["ab", "", "c", "a"]
    text, _ = labelled_text({"tokens": words, "tags": [1, 3, -100, 0]}, "token_classification", "tokens")  # fmt: skip
    (found,) = labelled_documents(
        text, "token_classification", encoder.ids, encoder.placed, bos_id=-1, eod_id=6
    )
    ids, places = encoder.placed(" ".join(words))
    assert found.ids.tolist() == [*ids.tolist(), 6]
    shown = [" ".join(words)[slice(*place)].strip() for place in places]
    seen = [(text[0], int(target) - 1) for text, target in zip(shown, found.targets, strict=False) if target]  # fmt: skip
    assert seen == [("a", 1), ("a", 0)]


def test_an_answer_is_beside_one_to_another_prompt(tmp_path, model):
    meta = _prepare(tmp_path, model, ANSWERED, "kto")
    stream, tokenizer = TokenStream(tmp_path / "out", meta.splits["train"]), templates.make_tokenizer()  # fmt: skip
    found, at = [], 0
    for length in stream.document_lengths():
        ids, targets = stream.read(at, at + length), stream.read_targets(at, at + length)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        answer = tokenizer.decode(ids[targets % 4 > 0].tolist(), skip_special_tokens=True)
        prompt = next(row["prompt"] for row in ANSWERED if row["prompt"] in text)
        found.append((prompt, answer.strip(), bool(targets[0] < 4)))
        at += length
    good = {row["prompt"]: row["label"] for row in ANSWERED}
    own = {row["prompt"]: row["completion"] for row in ANSWERED}
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert len(pairs) == len(ANSWERED)
    for (prompt, answer, is_good), (again, other, _) in pairs:
        assert prompt == again, "one prompt"
        assert answer == own[prompt], "its own answer first"
        assert is_good == good[prompt]
        assert other != own[prompt], "then that of another row"
    assert sorted(other for _, (_, other, _) in pairs) == sorted(own.values()), "each once"
    # as a job reads them
    rows = _rows(tmp_path, ANSWERS, pairs="base")
    assert sum(int(row.classes.sum()) for row in rows) == 4
    assert all(row.mask.sum() < sum(row.lengths) for row in rows), "prompts do not count"


BAD = [
    ("classification", '{"text": "a", "label": "sport"}', "not a whole number from 0 to 254"),
    ("classification", '{"text": 3, "label": 0}', "its 'text' is a int"),
    ("multiple_choice", '{"choices": ["a"], "label": 0}', "it has 1 choices, not 2 to 63"),
    ("multiple_choice", '{"choices": ["a", "b"], "label": 2}', "from 0 to 1"),
    ("token_classification", '{"tokens": ["a", "b"], "tags": [1]}', "no list of 2 classes"),
    ("kto", '{"prompt": "a", "completion": "b", "label": 1}', "not true or false"),
    ("regression", '{"text": "a", "label": true}', "not a number of float32"),
    ("regression", '{"text": "a", "label": 1e39}', "not a number of float32"),
    ("embedding", '{"anchor": "a", "positive": 3}', "its 'positive' is a int"),
]


@pytest.mark.parametrize(("row_format", "line", "why"), BAD)
def test_bad_rows_are_told(tmp_path, model, row_format, line, why):
    with pytest.raises(ConfigError, match=why):
        _prepare(tmp_path, model, [json.loads(line)], row_format)


def test_datasets_of_another_form_and_labels_beyond_the_head_are_refused(tmp_path, model):
    _prepare(tmp_path, model, CLASSES, "classification")
    values = {"data.path": str(tmp_path / "out"), "data.seq_len": 64, "data.packing": "best_fit"}
    (fault,) = training_faults(values)
    assert "--format classification" in fault.fact
    (fault,) = training_faults(values | {"preference.loss_type": "kto"})
    assert "--format kto prepares" in fault.rule
    with pytest.raises(DataError, match="the label 2"):
        _rows(tmp_path, RowForm("classes", 1, 2))


def test_a_dataset_of_another_format_is_not_taken_for_the_one_asked_for(tmp_path, model):
    assert _prepare(tmp_path, model, CLASSES, "text").row_format == "text"
    with pytest.raises(ConfigError, match="row_format"):
        _prepare(tmp_path, model, CLASSES, "classification")


def _pairs_of_texts(folder, meta):
    """The texts of the two documents of each row, without special tokens."""
    stream, tokenizer, texts, at = TokenStream(folder / "out", meta.splits["train"]), templates.make_tokenizer(), [], 0  # fmt: skip
    for length in stream.document_lengths():
        texts.append(tokenizer.decode(stream.read(at, at + length).tolist()))
        at += length
    return list(zip(texts[::2], texts[1::2], strict=True))


def test_answers_to_one_prompt_are_beside_those_to_another(tmp_path, model):
    """Corpora of pairs have the two answers to a prompt one after the other."""
    rows = [
        {"prompt": f"q{n // 2}?", "completion": f"{'good' if n % 2 else 'bad'}{n // 2}.", "label": bool(n % 2)}
        for n in range(6)
    ]  # fmt: skip
    meta = _prepare(tmp_path, model, rows, "kto")
    found = _pairs_of_texts(tmp_path, meta)
    assert len(found) == 6
    for own, other in found:
        number = own[own.index("?") - 1]
        assert f"q{number}?" in other and f"{number}." in own and f"{number}." not in other


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_one_prompt_alone_are_beside_each_other(tmp_path, model, count):
    rows = [{"completion": f"a{n}.", "label": True} for n in range(count)]
    meta = _prepare(tmp_path, model, rows, "kto")
    found = _pairs_of_texts(tmp_path, meta)
    assert len(found) == count
    for number, (own, other) in enumerate(found):
        assert f"a{number}." in own and f"a{(number - 1) % count}." in other


TURNS = (
    "{% for message in messages %}{% if message['role'] == 'user' and not loop.first %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_first_row_that_takes_no_other_answer_is_told(tmp_path, model):
    """The last row has its prompt in the answer, which the template refuses behind another prompt."""
    (tmp_path / "turns.jinja").write_text(TURNS)
    whole = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "a."}]
    rows = [ANSWERED[0], {"completion": whole, "label": False}]
    with pytest.raises(ConfigError, match="roles must alternate"):
        _prepare(tmp_path, model, rows, "kto", chat_template=str(tmp_path / "turns.jinja"))


def test_answers_are_shown_with_what_counts(tmp_path, model):
    meta = _prepare(tmp_path, model, ANSWERED, "kto")
    stream = TokenStream(tmp_path / "out", meta.splits["train"])
    labels = labels_of(stream, meta, "auto")
    length = int(stream.document_lengths().sum())
    kinds = stream.read_targets(0, length) % 4
    assert labels(0, length).tolist() == (kinds > 0).tolist()


@pytest.mark.parametrize(
    ("row_format", "rows", "form", "pairs"),
    [("kto", ANSWERED, ANSWERS, "alone"), ("multiple_choice", QUESTIONS, RowForm("choices", 3), "none")],
)  # fmt: skip
def test_inspection_packs_as_a_job_does(tmp_path, model, row_format, rows, form, pairs):
    meta = _prepare(tmp_path, model, rows, row_format)
    found = describe_packing(str(tmp_path / "out"), meta, Shape(seq_len=36, window=4))["train"]
    shape = Shape(seq_len=36, packing="best_fit", window=4, form=form, pairs=pairs)
    source = open_split(str(tmp_path / "out"), "train", shape, seed=0)
    assert found["rows"] == source.num_windows
    longest = 36 // form.size
    lengths = TokenStream(tmp_path / "out", meta.splits["train"]).document_lengths()
    assert found["truncated"] == (lengths > longest).sum() > 0
    if row_format == "kto":
        labels = sum(int(source.row(index).mask.sum()) for index in range(source.num_windows))
        assert found["labels"] == labels


@pytest.mark.parametrize(
    ("row_format", "rows", "head", "told"),
    [
        ("classification", CLASSES, {"kind": "sequence_classification", "num_labels": 2}, "has the label 2"),
        ("token_classification", TAGGED, {"kind": "token_classification", "num_labels": 2}, "has the label 2"),
        ("multiple_choice", QUESTIONS, {"kind": "multiple_choice", "num_choices": 2}, "a question with 3 choices"),
    ],
)  # fmt: skip
def test_a_label_that_the_head_lacks_is_found_before_a_run(
    tmp_path, model, row_format, rows, head, told
):
    _prepare(tmp_path, model, rows, row_format)
    values = {
        "data.path": str(tmp_path / "out"), "data.packing": "best_fit", "data.seq_len": 64, "data.global_batch_size": 4,
        "model.family": "llama", "run.eval_samples": 0,
    }  # fmt: skip
    (fault,) = training_faults(values | {"model.head": HeadSection(**head)})
    assert told in fault.fact
    enough = {name: value + 1 for name, value in head.items() if name != "kind"}
    assert training_faults(values | {"model.head": HeadSection(**head | enough)}) == []


def test_questions_of_fewer_choices_than_the_head_has_are_found_before_a_run(tmp_path, model):
    """Groups of four documents would have choices of two questions."""
    _prepare(tmp_path, model, QUESTIONS, "multiple_choice")
    form = RowForm("choices", 4)
    (fault,) = label_faults(str(tmp_path / "out"), form)
    assert "a question with 3 choices" in fault.fact and "num_choices=3" in fault.remedy
