"""Datasets of conversations: from every form of rows to the labels of a packed row."""

import json
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models

from raymega.data.arrow import TokenStream
from raymega.data.checks import training_faults
from raymega.data.format import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from raymega.data.inspect import describe_packing
from raymega.data.open_split import Shape, open_split
from raymega.errors import ConfigError, DataError
from raymega.prepare.chat.rows import DEFAULT_KEYS
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.prepare.show import _texts, show_documents
from tests.unit.prepare.chat import templates
from tests.unit.prepare.chat.templates import messages
from tests.unit.prepare.corpora import content

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")

CHATS = [
    messages(f"question {i} " * (i % 7 + 1), f"answer {i} " * (i % 5 + 1) + ".", "and?", f"no {i}")
    for i in range(60)
]
IM_END = "<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / TOKENIZER_FILE).write_text(templates.make_tokenizer().to_str())
    (folder / "chat_template.jinja").write_text(templates.CHATML)
    settings = {"bos_token": "<s>", "eos_token": IM_END}
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings))
    return folder


def _prepare(source, out, model, *, row_format="chat", **more):
    options = PrepareOptions(
        inputs=(str(source),), out=str(out), tokenizer=str(model), row_format=row_format,
        **{"text_key": DEFAULT_KEYS[row_format], "valid_fraction": 0.1, **more},
    )  # fmt: skip
    return prepare(options, on_progress=lambda *_: None).meta


def _lines(folder, rows):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def chat(model, tmp_path_factory):
    return tmp_path_factory.mktemp("chat"), model


@pytest.fixture
def dataset(model, tmp_path):
    _prepare(
        _lines(tmp_path / "in", [{"messages": each} for each in CHATS]), tmp_path / "out", model
    )
    return tmp_path / "out"


def test_tables_give_the_bytes_of_json_lines(dataset, model, tmp_path):
    table = tmp_path / "table"
    table.mkdir()
    rows = pa.table({"messages": CHATS, "id": list(range(len(CHATS)))})
    pq.write_table(rows, table / "rows.parquet", row_group_size=13)
    meta = _prepare(table, tmp_path / "other", model)
    assert meta.version == 3 and meta.row_format == "chat" and meta.tokenizer.eod_token == IM_END
    same = {
        name: raw for name, raw in content(dataset).items() if name.endswith((".arrow", ".npy"))
    }
    assert same and same.items() <= content(tmp_path / "other").items()


def test_table_with_calls_of_several_tools_and_times_gives_the_bytes_of_json_lines(model, tmp_path):
    """A column's type has the arguments of all tools: those of another tool are nulls in each call."""
    source = templates.CHATML.replace(
        "message['content']", "(message.content or (message.calls | tojson))"
    )
    (tmp_path / "tools.jinja").write_text(source)
    then, rows = datetime(2024, 1, 2, 3), []
    for value in ({"city": "Rome"}, {"x": 1, "y": [2]}):
        asked, answered = messages("who?", "he")
        calls = [{"function": {"name": "f", "arguments": value}}]
        rows.append(
            {"messages": [asked | {"time": then}, answered | {"content": "", "calls": calls}]}
        )
    (tmp_path / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table/rows.parquet")
    for row in rows:
        row["messages"][0]["time"] = str(then)
    wanted, found = (
        _prepare(folder, tmp_path / f"out-{folder.name}", model, valid_fraction=0.0,
                 chat_template=str(tmp_path / "tools.jinja"))
        for folder in (_lines(tmp_path / "lines", rows), tmp_path / "table")
    )  # fmt: skip
    assert found.splits == wanted.splits


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_labels_that_count_are_the_answers(dataset, packing):
    tokenizer = templates.make_tokenizer()
    split = open_split(str(dataset), "train", Shape(seq_len=160, packing=packing, window=8), seed=0)
    rows = [split.row(index) for index in range(split.num_windows)]
    found = "".join(
        tokenizer.decode(row.labels[row.mask].tolist(), skip_special_tokens=False) for row in rows
    )
    answers = [part for part in found.split(IM_END) if part]
    expected = {
        turn["content"].strip() for each in CHATS for turn in each if turn["role"] == "assistant"
    }
    assert len(answers) > 90
    # Windows of the stream begin and end inside of answers; packed rows hold whole conversations.
    inside = {answer.strip() for answer in answers} - expected
    assert not inside if packing == "best_fit" else len(inside) < 2 * len(rows)


def test_labels_of_the_last_answer_or_of_all(dataset):
    shape = {"seq_len": 256, "packing": "best_fit", "window": 8}
    counts = []
    for loss_on in ("completion", "assistant", "auto", "all"):
        split = open_split(str(dataset), "train", Shape(**shape, loss_on=loss_on), seed=0)
        counts.append(sum(int(split.row(index).mask.sum()) for index in range(split.num_windows)))
    assert counts[0] < counts[1] == counts[2] < counts[3]


def test_long_conversations_are_truncated_and_told(dataset):
    split = open_split(
        str(dataset), "train", Shape(seq_len=32, packing="best_fit", window=8), seed=0
    )
    meta_rows = describe_packing(str(dataset), _meta(dataset), Shape(seq_len=32, window=8))["train"]
    stream = TokenStream(dataset, _meta(dataset).splits["train"])
    lengths = stream.document_lengths()
    assert meta_rows["truncated"] == (lengths > 32).sum() > 0
    ends = np.cumsum(lengths)
    firsts = [
        stream.read_targets(end - n, end)[:32].any() for n, end in zip(lengths, ends, strict=True)
    ]
    assert meta_rows["without_labels"] == len(firsts) - sum(firsts) > 0
    # No row has the tail of a conversation.
    starts = {
        int(token)
        for index in range(split.num_windows)
        for token in _first_tokens(split.row(index))
    }
    assert starts <= {0, templates.make_tokenizer().token_to_id("<|im_start|>")}


def test_share_of_tokens_that_are_no_padding_is_told_to_four_digits(dataset):
    shape = Shape(seq_len=200, window=8)
    told = describe_packing(str(dataset), _meta(dataset), shape)["train"]
    lengths = TokenStream(dataset, _meta(dataset).splits["train"]).document_lengths()
    share = lengths.clip(max=200).sum() / (200 * told["rows"])
    assert told["packing_efficiency"] == round(share, 4) < 1


def _meta(folder):
    from raymega.data.format import read_meta

    return read_meta(folder)


def _first_tokens(row):
    return row.tokens[np.cumsum((0, *row.documents))[:-1]]


def test_preference_rows_are_pairs_that_no_job_trains_on(model, tmp_path):
    rows = [{"prompt": "why?", "chosen": "because.", "rejected": "no."}]
    rows += [{"chosen": messages("a", "b"), "rejected": messages("a", "c")}]
    meta = _prepare(_lines(tmp_path / "in", rows), tmp_path / "out", model, row_format="preference", valid_fraction=0)  # fmt: skip
    stream = TokenStream(tmp_path / "out", meta.splits["train"])
    tokenizer = templates.make_tokenizer()
    texts, at = [], 0
    for length in stream.document_lengths():
        ids, targets = stream.read(at, at + length), stream.read_targets(at, at + length)
        texts.append(tokenizer.decode(ids[targets > 0].tolist()))
        at += length
    assert texts == ["because.", "no.", "b", "c"]
    (fault,) = training_faults(
        {"data.path": str(tmp_path / "out"), "data.seq_len": 4, "data.packing": "best_fit"}
    )
    assert "pairs of a chosen and a rejected" in fault.fact


BAD_ROWS = {
    '{"text": "no messages"}': "it has no 'messages'; its keys are text",
    '{"messages": "hello"}': "its 'messages' is a str, not a list of messages",
    '{"messages": []}': "its 'messages' is an empty list",
    '{"messages": [{"from": "human", "value": "x"}]}': r"messages\[0\] has no 'role' and 'content' \(from, value\)",
    '{"messages": [{"role": "user", "content": "x"}]}': r"no message of the assistant \(roles: user\)",
    '{"messages": [{"role": "assistant", "content": 3}]}': r"the content of messages\[0\] is a int",
    '{"messages": [{"role": "assistant", "content": "<s>"}]}': "spells the special token '<s>'",
    '{"messages": [{"role": "assistant", "content": "a"}], "tools": 3}': "its 'tools' is a int, not a list",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_bad_row_is_told_with_its_place_and_may_be_left_out(model, tmp_path, line):
    folder = tmp_path / "in"
    folder.mkdir()
    good = json.dumps({"messages": CHATS[0]}) + "\n"
    (folder / "rows.jsonl").write_text(good + line + "\n" + good)
    with pytest.raises(ConfigError, match=BAD_ROWS[line]) as caught:
        _prepare(folder, tmp_path / "out", model, valid_fraction=0)
    assert f"rows.jsonl@{len(good)} has no document" in str(caught.value)
    meta = _prepare(folder, tmp_path / "out", model, valid_fraction=0, max_bad_lines=1)
    assert meta.splits["train"].num_documents == 2 and meta.source.num_bad_lines == 1


def test_options_that_do_not_fit_are_refused_before_anything_starts(model, tmp_path):
    rows = _lines(tmp_path / "in", [{"messages": CHATS[0]}])
    (tmp_path / "in" / "text.txt").write_text("a text")
    for more, why in (
        ({}, "text.txt with --format chat"),
        ({"include": ("*.jsonl",), "tokenizer": "bpe:300"}, "--tokenizer bpe:300"),
        ({"include": ("*.jsonl",), "tokenizer": "bytes"}, "has no chat template"),
        ({"include": ("*.jsonl",), "chat_template": "/nowhere"}, "--chat-template /nowhere cannot be read"),
        ({"row_format": "text", "chat_template": "x.jinja"}, "only conversations are rendered"),
    ):  # fmt: skip
        named = more.pop("tokenizer", model)
        with pytest.raises(ConfigError, match=why):
            _prepare(rows, tmp_path / "out", named, **more)
    assert not (tmp_path / "out").exists()


def test_template_of_a_file_comes_along(model, tmp_path):
    rows = _lines(tmp_path / "in", [{"messages": CHATS[0]}])
    path = tmp_path / "plain.jinja"
    path.write_text(templates.PLAIN)
    meta = _prepare(rows, tmp_path / "out", "bytes", valid_fraction=0, chat_template=str(path))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == templates.PLAIN
    assert "chat_template.jinja" in meta.tokenizer.files


def test_template_has_the_begin_of_the_models_own_settings(model, tmp_path):
    """That of a dataset of texts is the end of a document, which would stand before each conversation."""
    (tmp_path / "gemma.jinja").write_text(templates.GEMMA)
    meta = _prepare(
        _lines(tmp_path / "rows", [{"messages": chat} for chat in CHATS]), tmp_path / "out", model,
        chat_template=str(tmp_path / "gemma.jinja"),
    )  # fmt: skip
    stream, first = TokenStream(tmp_path / "out", meta.splits["train"]), templates.make_tokenizer()
    assert stream.read(0, 2).tolist() == [*map(first.token_to_id, ("<s>", "<start_of_turn>"))]
    # by these settings an export is asked
    settings = json.loads((tmp_path / "out" / TOKENIZER_CONFIG_FILE).read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", IM_END)


def test_text_dataset_has_no_answers_to_count(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("some text " * 20)
    _prepare(folder, tmp_path / "out", "bytes", row_format="text", valid_fraction=0)
    values = {"data.path": str(tmp_path / "out"), "data.seq_len": 16, "data.loss_on": "assistant"}
    (fault,) = training_faults(values)
    assert "data.loss_on=assistant" in fault.fact and "holds texts" in fault.fact


def test_tokens_of_sentencepiece_are_shown_with_their_spaces(tmp_path):
    """Its decoder drops the space that begins a text, as which each token was decoded."""
    words = ["<s>", "</s>", "\u2581the", "\u2581cat", "s", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    space = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [0, 2, 3, 4, *(5 + byte for byte in "\N{GRINNING FACE}".encode()), 3, 1]
    shown = [*_texts(tokenizer, ids)]
    assert shown == ["<s>", " the", " cat", "s", "", "", "", "\N{GRINNING FACE}", " cat", "</s>"]


def test_a_dataset_without_its_tokenizer_is_refused_by_show(dataset):
    meta = _meta(dataset)
    (dataset / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        next(show_documents(str(dataset), meta, split="train", first=0, count=1, loss_on="auto"))


def test_shown_documents_have_their_tokens_labels_and_rows(dataset):
    meta = _meta(dataset)
    found = list(
        show_documents(str(dataset), meta, split="train", first=2, count=2, loss_on="auto")
    )
    assert [document.number for document in found] == [2, 3]
    for document in found:
        chat = CHATS[document.row]
        text = "".join(token.text for token in document.tokens)
        assert document.file.endswith("rows.jsonl") and text.startswith(
            f"<|im_start|>user\n{chat[0]['content']}"
        )
        counted = "".join(token.text for token in document.tokens if token.counts)
        assert counted == "".join(turn["content"] + IM_END for turn in chat[1::2])
    with pytest.raises(ConfigError, match=r"has 5. documents, from 0 on"):
        next(show_documents(str(dataset), meta, split="train", first=99, count=1, loss_on="auto"))
