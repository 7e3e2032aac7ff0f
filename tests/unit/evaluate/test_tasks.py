"""Tasks: what they ask, and what the scores of their requests become."""

import json
from math import exp, inf, log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.config.load import parse_job
from raymega.errors import ConfigError
from raymega.evaluate.requests import RequestSource, Scores, make_request, rows_on_grid
from raymega.evaluate.tasks.json_lines import read_texts
from raymega.evaluate.tasks.lambada import lambada, split_last_word
from raymega.evaluate.tasks.perplexity import perplexity
from raymega.evaluate.tasks.race import race
from raymega.evaluate.tasks.task import Settings
from raymega.evaluate.tasks.wikitext import detokenise, wikitext
from raymega.evaluate.tasks.windows import windows
from raymega.plan.run_plan import make_plan

SETTINGS = Settings(seq_len=16)
VERIFY = Path(__file__).parents[3] / "jobs" / "verify.yaml"
CP2 = "parallel.cp=2", "data.document_multiple=4"


class Bytes:
    """A token is a byte."""

    eod_id = 256

    def ids(self, text):
        return list(text.encode())


def _scores(questions, log_prob=-1.0):
    """The same log-probability for every target; greedy where the target is a vowel."""
    return [
        Scores(
            log_probs=np.full(request.num_targets, log_prob),
            is_greedy=np.isin(request.tokens[-request.num_targets :], list(b" aeiou")),
        )
        for request in questions.requests
    ]


@given(
    num_tokens=st.integers(2, 300),
    seq_len=st.integers(1, 50),
    share=st.floats(0.01, 1.0),
)
def test_windows_score_each_token_once_with_a_whole_context(num_tokens, seq_len, share):
    stride = max(1, int(seq_len * share))
    found = windows(range(num_tokens), seq_len=seq_len, stride=stride)
    targets = [t for each in found for t in each.tokens[-each.num_targets :].tolist()]
    assert targets == list(range(1, num_tokens))
    assert all(len(each.tokens) <= seq_len + 1 for each in found)
    # all later windows but the last score `stride` tokens after all the context that fits
    assert all(len(each.tokens) == seq_len + 1 for each in found[1:-1])
    assert all(each.num_targets == stride for each in found[1:-1])


def test_words_of_wikitext_are_those_of_the_raw_file(tmp_path):
    raw = ' \n = Robert <unk> = \n \n He was born in the 1970s , and " won " 2 @,@ 500 @-@ odd games ( twice ) . \n'
    plain = detokenise(raw)
    assert (
        plain
        == '\n= Robert <unk> =\n\nHe was born in the 1970s, and "won" 2,500-odd games (twice).\n'
    )
    file = tmp_path / "wiki.test.tokens"
    file.write_text(raw)
    questions = wikitext(file, Bytes(), Settings(seq_len=16, stride=4))
    num_words, num_tokens = len(raw.strip().split(" ")), len(plain.encode())
    assert questions.words == num_words and "1 <unk>" in questions.notes[0]
    metrics, samples = questions.judge(_scores(questions))
    assert metrics["loss"] == 1.0 and metrics["token_perplexity"] == exp(1)
    assert metrics["word_perplexity"] == pytest.approx(exp((num_tokens - 1) / (num_words - 1)))
    assert len(samples) == len(questions.requests)
    assert len(wikitext(file, Bytes(), Settings(seq_len=16, limit=3)).requests) == 3


def test_lambada_needs_the_whole_word_and_its_loose_form_the_last_token(tmp_path):
    assert split_last_word("so it is said. said he \n") == ("so it is said. said", " he")
    file = tmp_path / "lambada.jsonl"
    lines = ["she said aei", "he had a kite", "and then xxx"]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    questions = lambada(file, Bytes(), SETTINGS)
    assert [r.num_targets for r in questions.requests] == [4, 1, 5, 1, 4, 1]
    metrics, samples = questions.judge(_scores(questions))
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["accuracy_loose"] == pytest.approx(2 / 3)
    assert metrics["target_perplexity"] == pytest.approx(exp(13 / 3))
    assert [s["target"] for s in samples] == ["aei", "kite", "xxx"]


def test_race_takes_the_likeliest_option(tmp_path):
    file = tmp_path / "race.json"
    article = {
        "article": "A cat sat.",
        "questions": ["Who sat?", "A _ sat."],
        "options": [["a dog", "cat", "nobody", "cows"], ["big dog", "mole", "cat", "animal"]],
        "answers": ["B", "C"],
    }
    file.write_text(json.dumps(article))
    questions = race(file, Bytes(), Settings(seq_len=64))
    texts = [bytes(r.tokens.tolist()).decode() for r in questions.requests]
    assert texts[1] == "A cat sat.\nQuestion: Who sat?\nAnswer: cat"
    assert texts[6] == "A cat sat.\nA cat sat."
    # equal log-probabilities a token: the shortest option is the likeliest
    metrics, samples = questions.judge(_scores(questions))
    assert metrics["accuracy"] == 1.0 and [s["chosen"] for s in samples] == [1, 2]


def test_perplexity_of_documents_begins_after_the_end_of_document(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one two"}\n{"text": "three"}\n')
    questions = perplexity(file, Bytes(), SETTINGS)
    assert [r.tokens[0] for r in questions.requests] == [256, 256]
    metrics, samples = questions.judge(_scores(questions))
    assert metrics["bits_per_byte"] == pytest.approx(1 / log(2))
    assert metrics["word_perplexity"] == pytest.approx(exp(12 / 3))
    assert [s["loss_sum"] for s in samples] == [7.0, 5.0]


@pytest.mark.parametrize("task", [perplexity, wikitext, lambada])
def test_a_perplexity_that_no_float_holds_is_infinite(task, tmp_path):
    """A text without spaces is one word, whose perplexity is that of all its tokens at once."""
    text = "\u4e2d\u6587" * 200
    file = tmp_path / "text.jsonl"
    file.write_text(f"one {text}" if task is wikitext else json.dumps({"text": f"a {text}"}))
    questions = task(file, Bytes(), Settings(seq_len=2048))
    metrics, _ = questions.judge(_scores(questions, log_prob=-1500.0))
    assert inf in metrics.values()
    assert task is lambada or metrics["loss"] == 1500.0


def test_line_ends_of_other_alphabets_are_part_of_a_text(tmp_path):
    file = tmp_path / "texts.jsonl"
    texts = ["one\u2028two", "three\u2029 four\u0085", "five six"]
    file.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    assert read_texts(file) == texts


@pytest.mark.parametrize("task", [perplexity, wikitext, lambada])
def test_a_file_in_another_encoding_is_refused(task, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_bytes('{"text": "caf\u00e9 noir"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"texts\.jsonl is no UTF-8 text: byte 13 is 0xe9"):
        task(file, Bytes(), SETTINGS)


def test_a_passage_of_one_word_has_nothing_to_predict_from(tmp_path):
    file = tmp_path / "passages.jsonl"
    file.write_text('{"text": "alone"}\n{"text": "two words"}\n')
    assert lambada(file, Bytes(), SETTINGS).documents == 1


def test_a_request_that_is_too_long_keeps_its_end():
    request = make_request(range(30), 3, seq_len=16)
    assert request.tokens.tolist() == list(range(13, 30)) and request.num_targets == 3
    assert make_request(range(30), 20, seq_len=16).num_targets == 16


@pytest.mark.parametrize(
    ("task", "text", "place"),
    [
        (lambada, '{"text": "a b"}\n{"txt": "a b"}\n', ":2"),
        (lambada, '{"text": "a b"}\n{"text": 7}\n', ":2"),
        (lambada, '{"text": "a b"}\nno json\n', ":2"),
        (lambada, '[{"text": "a b"}, 5]', "[1]"),
        (race, '{"article": "a", "questions": ["b"], "options": [["c"]], "answers": []}', ":1"),
        (race, '{"article": "a", "questions": ["b"], "options": [["c"]], "answers": ["D"]}', ":1"),
    ],
)
def test_a_wrong_line_is_named(task, text, place, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        task(file, Bytes(), SETTINGS)
    assert f"{file}{place}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "num_requests", "seq_len"),
    [
        ((), 1, 32),  # 5 inputs
        ((), 7, 64),  # 35 inputs
        ((), 40, 128),  # two rows: as long as the run's
        ((*CP2,), 7, 64),  # 8 inputs each, with padding
        (("parallel.tp=2", *CP2), 1, 128),
        (("data.document_multiple=128",), 1, 128),
        (("data.seq_len=100",), 1, 100),  # no multiple of 32 is a part of it
    ],
)
def test_rows_are_as_short_as_one_that_holds_all_requests(fields, num_requests, seq_len):
    length = ["data.seq_len=128", "model.max_positions=128", "data.packing=best_fit"]
    job = parse_job(VERIFY, [*length, *fields]).job()
    asked = [make_request(range(n, n + 6), 2, seq_len=16) for n in range(num_requests)]
    source = rows_on_grid(asked, make_plan(job))
    assert (source.seq_len, source.num_rows == 1) == (seq_len, num_requests < 40)
    assert len(source.row(0).tokens) == sum(source.row(0).documents) == seq_len


def test_requests_with_the_same_tokens_are_read_once_and_each_has_its_own_targets():
    asked = [make_request(range(6), 4, seq_len=16), make_request(range(9), 2, seq_len=16)]
    asked.append(make_request(range(6), 1, seq_len=16))
    source = RequestSource(asked, seq_len=16)
    assert source.num_rows == 1 and sorted(source.members(0)) == [0, 1, 2]
    row = source.row(0)
    assert sorted(row.documents) == [3, 5, 8] and int(row.mask.sum()) == 4 + 2
    for number, request in enumerate(asked):
        assert (
            row.labels[source.targets(number)].tolist()
            == request.tokens[-request.num_targets :].tolist()
        )
