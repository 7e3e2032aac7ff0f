"""Near duplicates: recall by similarity, no removal below the threshold, scripts without spaces."""

import random

import numpy as np
import pytest

from raymega.curate.duplicates import near
from raymega.curate.duplicates.keys import id_of
from raymega.curate.duplicates.near import (
    BAND,
    PAIR,
    band_keys,
    choose_removals,
    find_pairs,
    signature,
)
from raymega.curate.duplicates.shingle_sets import SortedSet, jaccard, shingle_set, similarity
from raymega.curate.options import Decontaminate, Near
from raymega.curate.steps.decontaminate import DecontaminateStep, hash_tasks
from raymega.curate.steps.quality_model import features
from raymega.curate.tokens import tokenize
from raymega.errors import InternalError
from tests.unit.curate.corpora import edited, prose

OPTIONS = Near()
JAPANESE = (
    "\u3053\u306e\u6587\u66f8\u306f\u30c7\u30d3\u30a2\u30f3\u30b7\u30b9\u30c6\u30e0\u306e\u4f7f\u3044\u65b9\u3092"
    "\u8aac\u660e\u3059\u308b\u624b\u5f15\u304d\u66f8\u3067\u3042\u308a\u3001\u521d\u5fc3\u8005\u306b\u3082"
)


def _exact_jaccard(first, second, words=5):
    """The similarity of two texts by sets of strings."""
    sets = [{tuple(text.lower().split()[at : at + words]) for at in range(len(text.split()) - words + 1)}
            for text in (first, second)]  # fmt: skip
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_similarity_is_that_of_sets_of_words():
    letters = [
        " ".join(f"w{random.Random(seed).randrange(40)}x" for seed in range(at, at + 200))
        for at in (0, 40)
    ]
    first, second = (shingle_set(text, OPTIONS) for text in letters)
    assert jaccard(first, second) == pytest.approx(_exact_jaccard(*letters))
    assert jaccard(first, first) == 1 and jaccard(first, first[:0]) == 0


def test_comparison_of_sets_out_of_order_ends():
    portions = [np.array([5, 6, 7, 8, 9, 1], dtype=np.uint64)]
    odd = SortedSet(size=6, portions=lambda: iter(portions))
    with pytest.raises(InternalError, match="none has a number up to 1, the end of one"):
        similarity(odd, odd)


def test_bands_find_what_is_similar():
    found = {0.9: [], 0.8: []}
    for seed in range(20):
        for text in prose()[:30]:
            other = edited(text, seed / 400, seed)
            sets = [shingle_set(each, OPTIONS) for each in (text, other)]
            level = next((level for level in found if jaccard(*sets) >= level), None)
            if level and len(sets[0]) > 20:
                keys = [band_keys(signature(each, OPTIONS), OPTIONS) for each in sets]
                found[level].append(bool((keys[0] == keys[1]).any()))
    assert len(found[0.9]) > 100 and np.mean(found[0.9]) >= 0.99
    assert len(found[0.8]) > 50 and np.mean(found[0.8]) >= 0.9


def test_share_of_equal_minima_is_the_similarity():
    many = Near(bands=100, rows=10)
    text = " ".join(f"word{at}" for at in range(600))
    first, second = (shingle_set(each, many) for each in (text, edited(text, 0.06)))
    share = np.mean(signature(first, many) == signature(second, many))
    # The standard deviation of 1,000 draws is below 0.016.
    assert share == pytest.approx(jaccard(first, second), abs=0.05)


@pytest.mark.parametrize(
    "text",
    [
        JAPANESE,
        "\u672c\u6587\u6863\u662f\u5173\u4e8e\u8ba1\u7b97\u673a\u7684\u624b\u518c",
        "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
    ],
)
def test_each_character_is_a_word_where_there_are_no_spaces(text):
    tokens = tokenize(text)
    assert len(tokens.hashes) > 5
    changed = text[:-1] + "\u4e00"
    assert jaccard(shingle_set(text, OPTIONS), shingle_set(changed, OPTIONS)) > 0.3


def test_japanese_edit_is_found():
    draw = random.Random(1)
    text = "".join(draw.choice(JAPANESE) for _ in range(800))
    other = text[:400] + "\u65b0" + text[401:]
    sets = [shingle_set(each, OPTIONS) for each in (text, other)]
    keys = [band_keys(signature(each, OPTIONS), OPTIONS) for each in sets]
    assert 0.95 < jaccard(*sets) < 1 and (keys[0] == keys[1]).any()


def test_long_text_is_cut_into_blocks_without_a_trace(monkeypatch):
    text = " ".join(prose())
    whole = tokenize(text)
    monkeypatch.setattr("raymega.curate.tokens.BLOCK_CHARACTERS", 1000)
    cut = tokenize(text)
    for name in ("hashes", "starts", "ends"):
        assert np.array_equal(getattr(whole, name), getattr(cut, name))
    assert text[whole.starts[7] : whole.ends[7]].isalnum()


@pytest.mark.parametrize("block", [300, 5000])
@pytest.mark.parametrize("filler", ["", "-" * 3000], ids=["words", "marks"])
def test_what_is_made_of_blocks_is_that_of_the_whole_text(block, filler, monkeypatch):
    text = f"{filler} one two {filler} three {filler}".join(prose()[:20])
    step = DecontaminateStep(Decontaminate(tasks=("x",)), hash_tasks([prose()[7]], 13))

    def results(text):
        spans = step._spans(text)
        sets = [shingle_set(text, Near(words=words)) for words in (1, 5, 30)]
        return [spans, *features(text), *sets]

    short = f"one two {filler} three"
    whole, of_short = results(text), results(short)
    assert len(whole[0]) > 5
    monkeypatch.setattr("raymega.curate.tokens.BLOCK_CHARACTERS", block)
    monkeypatch.setattr("raymega.curate.steps.quality_model.BLOCK_CHARACTERS", block)
    for before, after in ((whole, results(text)), (of_short, results(short))):
        assert all(map(np.array_equal, before, after))


def _pair(larger, smaller, score=0.9):
    row = np.zeros(1, dtype=PAIR)
    row["low"], row["other_low"], row["score"] = larger, smaller, score
    row["row"], row["other_row"] = larger, smaller
    return row


def test_document_stays_where_none_that_is_kept_is_similar():
    # 1 ~ 2 ~ 3, but not 1 ~ 3: 2 goes for 1, and then 3 has no kept document that is similar.
    found, groups = choose_removals(np.concatenate([_pair(3, 2), _pair(2, 1), _pair(5, 4)]))
    assert found["row"].tolist() == [2, 5] and len(groups) == 2
    assert [id_of(high, low) for high, low in found[["high", "low"]].tolist()] == [
        id_of(0, 1),
        id_of(0, 4),
    ]


def test_pairs_have_the_larger_id_first_and_each_once():
    rows = np.zeros(6, dtype=BAND)
    rows["band"], rows["low"] = [7, 7, 7, 8, 8, 9], [3, 1, 2, 1, 2, 4]
    pairs = find_pairs(rows)
    assert pairs[["low", "other_low"]].tolist() == [(2, 1), (3, 1), (3, 2)]


def test_large_bucket_is_compared_with_its_first_and_its_neighbours(monkeypatch):
    monkeypatch.setattr(near, "NEIGHBOURS", 3)
    rows = np.zeros(10, dtype=BAND)
    rows["low"] = range(10)
    pairs = {tuple(pair) for pair in find_pairs(rows)[["low", "other_low"]].tolist()}
    assert {(at, 0) for at in range(1, 10)} <= pairs
    assert {(at, at - 3) for at in range(3, 10)} <= pairs and (9, 4) not in pairs
