"""Masks of encoders: whole words inside one segment of one document, keyed by sample, as megatron-core draws them."""

from types import SimpleNamespace

import numpy as np
import pytest

from raymega.config.encoder import MaskingSection
from raymega.data.row_rules.masking import Masks, continuations, masks_of
from raymega.data.samples import open_samples
from raymega.errors import DataError
from tests.support.jobs import make_test_plan

CLS, SEP, MASK, VOCAB = 100, 101, 102, 110
IDS = {"cls_token_id": CLS, "sep_token_id": SEP, "mask_token_id": MASK}
LEAST_P = 1e-3


def _masks(*, sentence_loss="none", multiple=1, words=False, name="7/mask/train", **numbers):
    begins = np.arange(VOCAB) % 3 != 2 if words else None
    section = MaskingSection(**IDS, **numbers)
    return Masks(
        section=section, sentence_loss=sentence_loss, vocab_size=VOCAB, name=name, multiple=multiple,
        begins_word=begins,
    )  # fmt: skip


def _text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 100, length)


def test_a_row_reads_its_document_and_labels_are_the_tokens_themselves():
    text = _text(43)
    row = _masks().row([(text, 43)], None, 5, seq_len=43)
    assert row.labels[0] == CLS
    assert row.labels[-1] == SEP
    assert np.array_equal(row.labels[1:-1], text[:41])
    assert row.mask.sum() == int(0.15 * 41)
    assert np.array_equal(row.tokens[~row.mask], row.labels[~row.mask])
    assert not row.mask[[0, -1]].any()
    assert (row.segment_pairs == -1).all()
    assert (row.token_types == 0).all()


def test_masks_depend_on_seed_sample_and_document_alone():
    text = _text(40)
    first = _masks().row([(text, 40)], None, 5, seq_len=40)
    again = _masks().row([(text, 40)], None, 5, seq_len=60)
    assert np.array_equal(first.mask, again.mask[:40])
    assert np.array_equal(first.tokens, again.tokens[:40])
    others = (
        _masks().row([(text, 40)], None, 6, seq_len=40),
        _masks(name="8/mask/train").row([(text, 40)], None, 5, seq_len=40),
    )
    assert all(not np.array_equal(first.mask, other.mask) for other in others)
    two = _masks().row([(text, 40), (text, 40)], None, 5, seq_len=80)
    assert np.array_equal(two.mask[:40], first.mask)
    assert not np.array_equal(two.mask[40:], first.mask)


def test_eight_of_ten_predicted_tokens_are_read_as_the_mask_and_one_as_itself():
    """The tenth is read as one of all tokens (Devlin et al. 2019, section 3.1), which may be those two as well."""
    text, masks, seen = _text(402), _masks(), np.zeros(3)
    for sample in range(100):
        row = masks.row([(text, 402)], None, sample, seq_len=402)
        read, label = row.tokens[row.mask], row.labels[row.mask]
        is_mask, is_itself = read == MASK, read == label
        seen += is_mask.sum(), is_itself.sum(), (~is_mask & ~is_itself).sum()
    assert seen.sum() == 100 * int(0.15 * 400)
    wanted = seen.sum() * (np.array([0.8, 0.1, 0.1]) + np.array([1, 1, -2]) * 0.1 / VOCAB)
    assert ((seen - wanted) ** 2 / wanted).sum() < -2 * np.log(LEAST_P)  # chi-square of two


def test_special_tokens_of_a_text_are_never_masked():
    text = np.where(np.arange(42) % 2, _text(42), SEP)
    for sample in range(20):
        row = _masks().row([(text, 42)], None, sample, seq_len=42)
        assert row.mask.sum() == int(0.15 * 20)
        assert not (row.labels[row.mask] == SEP).any()


def test_documents_end_at_the_multiple_that_they_fill_and_padding_is_a_document_of_its_own():
    texts = [(_text(14), 16), (_text(3), 4), (_text(8), 8)]
    row = _masks(multiple=4, sentence_loss="sentence_order").row(texts, None, 1, seq_len=32)
    assert row.documents == (12, 4, 4, 8, 4)
    assert np.flatnonzero(row.segment_pairs >= 0).tolist() == [0, 20]
    assert not row.mask[12:20].any()
    assert not row.mask[28:].any()
    assert row.mask[:12].any()
    assert row.mask[20:28].any()
    assert row.labels[[0, 11, 20, 27]].tolist() == [CLS, SEP, CLS, SEP]


@pytest.mark.parametrize("loss", ["sentence_order", "next_sentence"])
def test_pairs_are_of_both_classes_and_their_segments_have_types(loss):
    text, other = _text(37), np.arange(60, 67)
    masks, classes = _masks(sentence_loss=loss), []
    for sample in range(400):
        row = masks.row([(text, 40)], other, sample, seq_len=40)
        ends = np.flatnonzero(row.labels[:37] == SEP)
        assert len(ends) == 2
        assert np.array_equal(row.token_types[:37], np.arange(37) > ends[0])
        a, b = row.labels[1 : ends[0]], row.labels[ends[0] + 1 : 36]
        label = int(row.segment_pairs[0])
        joined = np.concatenate([b, a] if label and loss == "sentence_order" else [a, b])
        if label and loss == "next_sentence":
            assert np.array_equal(b, other[: len(b)])
            assert np.array_equal(a, text[: len(a)])
        else:
            assert np.array_equal(joined, text[:34])
        classes.append(label)
    assert 160 < sum(classes) < 240


def test_whole_words_are_masked_and_never_across_segments():
    text = np.array([0, 2, 5, 8, 1, 2, 3, 4, 5, 6, 7, 9, 2, 10] * 3)
    masks = _masks(words=True, sentence_loss="sentence_order", max_ngram=3, masking_probability=0.4)
    for sample in range(60):
        row = masks.row([(text, 42)], None, sample, seq_len=42)
        # a token that continues a word has the mask of the token before it, unless a segment begins there
        inside = (row.labels % 3 == 2) & (row.labels < 100)
        inside[1:] &= row.labels[:-1] < 100
        at = np.flatnonzero(inside)
        assert np.array_equal(row.mask[at], row.mask[at - 1])


def test_words_begin_as_the_tokenizer_writes_it():
    word_piece = {
        "type": "WordPiece",
        "continuing_subword_prefix": "##",
        "vocab": {"a": 0, "##b": 1, "[MASK]": 2},
    }
    assert continuations({"model": word_piece, "added_tokens": [{"content": "[MASK]"}]}) == [1]
    bpe = {"type": "BPE", "vocab": {"a": 0, "\u0120b": 1, "<mask>": 2}}
    assert continuations({"model": bpe, "added_tokens": [{"content": "<mask>"}]}) == [0]
    unigram = {"type": "Unigram", "vocab": [["\u2581a", -1.0], ["b", -2.0]]}
    assert continuations({"model": unigram}) == [1]


BERT = (
    "model.family=bert", "model.num_kv_heads=num_heads", "data.masking={mask_token_id: 66, cls_token_id: 64, sep_token_id: 65}",
    "model.encoder.sentence_loss=next_sentence",
)  # fmt: skip


def test_a_run_has_other_masks_in_its_second_epoch_and_in_validation():
    job = make_test_plan(*BERT).job
    samples = open_samples(job)
    row, later = samples.row(3), samples.row(3 + (1 << 16))
    assert row.token_types is not None
    assert not np.array_equal(row.mask, later.mask)
    assert masks_of(job, "train").name != masks_of(job, "valid").name
    assert masks_of(make_test_plan().job, "train") is None


def test_whole_words_need_a_tokenizer(tmp_path):
    job = make_test_plan(*BERT, "data.masking.whole_word=true").job
    data = job.data.model_copy(update={"path": str(tmp_path)})
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        masks_of(job.model_copy(update={"data": data}), "train")


@pytest.mark.wide
@pytest.mark.parametrize(("words", "max_ngram"), [(False, 1), (True, 1), (True, 3)])
def test_masks_have_the_distributions_of_megatron_core(words, max_ngram):
    """Its dataset draws with another generator: places, counts and replacements have the same shares."""
    stats = pytest.importorskip("scipy.stats")
    bert = pytest.importorskip("megatron.core.datasets.bert_dataset")
    kind = bert.BERTMaskedWordPieceDataset
    names = {token: "##x" if words and token % 3 == 2 else "x" for token in range(VOCAB)}
    tokenizer = SimpleNamespace(cls=CLS, sep=SEP, mask=MASK, inv_vocab=names)
    config = SimpleNamespace(
        tokenizer=tokenizer, masking_probability=0.15, masking_max_ngram=max_ngram, masking_do_full_word=words,
        masking_use_longer_ngrams=False, masking_use_geometric_distribution=False, masking_do_permutation=False,
    )  # fmt: skip
    theirs = SimpleNamespace(config=config, token_lookup=list(range(VOCAB)))
    theirs._get_token_mask = lambda state: kind._get_token_mask(theirs, state)
    text = _text(42)
    if words:  # a segment's first token begins a word
        text[0] = 0
    masks, state = _masks(words=words, max_ngram=max_ngram), np.random.RandomState(3)
    whole = [CLS, *text[:40].tolist(), SEP]
    found = np.zeros((2, 3, 42))
    counts = np.zeros((2, 12))
    for sample in range(3000):
        read, at, _, _, _ = kind._create_masked_lm_predictions(theirs, list(whole), 40, state)
        row = masks.row([(text, 42)], None, sample, seq_len=42)
        mine = np.flatnonzero(row.mask)
        for side, (tokens, places) in enumerate(
            ((row.tokens, mine), (np.array(read), np.array(at)))
        ):
            counts[side, len(places)] += 1
            for place in places:
                is_kept = tokens[place] == whole[place]
                found[side, 0 if tokens[place] == MASK else 1 if is_kept else 2, place] += 1
    tables = (found.sum(1), found.sum(2), counts)
    for table in tables:
        seen = table[:, table.sum(0) > 10]
        assert seen.shape[1] == 1 or stats.chi2_contingency(seen).pvalue > LEAST_P
