"""Span corruption: what both sides read, documents apart, keyed by sample, as T5 and megatron-core draw spans."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from raymega.config.encoder import SpanCorruptionSection
from raymega.data.row_rules.span_corruption import SpanCorruption, span_corruption_of
from raymega.data.samples import open_samples
from raymega.plan.layers.encoder_decoder import corrupted_lengths
from tests.support.jobs import make_test_plan

EOS, START, FIRST, LENGTH = 1, 0, 199, 40
LEAST_P = 1e-3


def _rule(*, lengths=(60, 40), name="7/spans/train", **numbers):
    section = SpanCorruptionSection(
        first_sentinel_id=FIRST, num_sentinels=50, eos_token_id=EOS, decoder_start_token_id=START, **numbers
    )  # fmt: skip
    return SpanCorruption(section=section, lengths=lengths, name=name)


def _text(length, seed=0, least=10):
    return np.random.default_rng(seed).integers(least, least + 60, length)


def _sides(row, number):
    """Source, target, and what the decoder reads, of one document."""
    here, size = row.stream_documents == number, row.documents[0]
    return (
        row.tokens[:size][here[:size]],
        row.labels[size:][here[size:]],
        row.tokens[size:][here[size:]],
    )


def _joined(source, target):
    """The text that a source and its target are made of, and its spans."""
    spans, at = {}, None
    for token in target[:-1].tolist():
        if FIRST - 50 < token <= FIRST:
            at = spans.setdefault(token, [])
        else:
            at.append(token)
    found = []
    for token in source[:-1].tolist():
        found += spans.get(token, [token])
    return found, list(spans.values())


@pytest.mark.parametrize("kind", ["segments", "geometric"])
def test_source_and_target_are_the_text(kind):
    text = _text(LENGTH)
    for sample in range(50):
        row = _rule(span_lengths=kind).row([text], sample)
        source, target, read = _sides(row, 0)
        joined, spans = _joined(source, target)
        assert joined == text.tolist()
        assert [token for token in target.tolist() if token > 150] == list(
            range(FIRST, FIRST - len(spans), -1)
        )
        assert source[-1] == target[-1] == EOS
        assert read[0] == START
        assert np.array_equal(read[1:], target[:-1])
        assert row.mask.sum() == len(target)
        if kind == "segments":
            filled = np.count_nonzero(row.stream_documents == 0) / len(row.tokens)
            assert _rule().filled(LENGTH) == filled
            assert sum(map(len, spans)) == 6
            assert len(spans) == 2


def test_documents_are_corrupted_apart_and_padding_is_of_none():
    texts = [_text(20, 1), _text(9, 2), _text(15, 3)]
    row = _rule().row(texts, 4)
    for number, text in enumerate(texts):
        source, target, _ = _sides(row, number)
        joined, spans = _joined(source, target)
        assert joined == text.tolist()
        assert spans
        here = row.stream_documents == number
        assert row.stream_positions[:60][here[:60]].tolist() == list(range(len(source)))
        assert row.stream_positions[60:][here[60:]].tolist() == list(range(len(target)))
    is_padding = row.stream_documents < 0
    assert is_padding[:60].any()
    assert not row.mask[is_padding].any()


def test_a_document_without_room_loses_its_end():
    row = _rule(lengths=(30, 12)).row([_text(20, 1), _text(20, 2)], 4)
    source, target, _ = _sides(row, 1)
    joined, _ = _joined(source, target)
    assert 2 <= len(joined) < 20
    assert joined == _text(20, 2)[: len(joined)].tolist()
    crowded = _rule(lengths=(20, 40)).row([_text(20, 1), _text(20, 2)], 4)
    assert crowded.stream_documents.max() == 0


def test_a_document_that_fits_exactly_is_whole_and_one_of_two_tokens_is_a_document():
    sizes = corrupted_lengths(_rule().section, 20)
    for short in ((0, 0), (1, 0), (0, 1)):
        lengths = tuple(size - less for size, less in zip(sizes, short, strict=True))
        source, target, _ = _sides(_rule(lengths=lengths).row([_text(20)], 4), 0)
        joined, _ = _joined(source, target)
        assert (joined == _text(20).tolist()) == (short == (0, 0))
    source, target, _ = _sides(_rule().row([_text(2)], 4), 0)
    assert _joined(source, target) == (_text(2).tolist(), [[_text(2)[1]]])
    assert not _rule().row([_text(1)], 4).mask.any()


def test_geometric_spans_have_their_distribution_and_fill_share_and_room():
    """A fifth of spans ends with each token, up to the most."""
    stats = pytest.importorskip("scipy.stats")
    rule = _rule(span_lengths="geometric", noise_density=0.2, max_span_length=4)
    for sample in range(10):
        spans = rule.geometric(200, 200, rule._random(sample, 0))
        assert sum(stop - start for start, stop in spans) == 40
    targets = [
        sum(stop - start + 1 for start, stop in rule.geometric(200, 12, rule._random(sample, 1)))
        + 1
        for sample in range(10)
    ]
    assert max(targets) == 12
    alone = replace(rule, section=rule.section.model_copy(update={"num_sentinels": 1}))
    firsts, sizes = np.zeros(10), np.zeros(4)
    for sample in range(2000):
        ((start, stop),) = alone.geometric(200, 200, alone._random(sample, 2))
        firsts[start // 20] += 1
        sizes[stop - start - 1] += 1
    assert stats.chisquare(firsts).pvalue > LEAST_P
    assert stats.chisquare(sizes, 2000 * np.array([0.2, 0.16, 0.128, 0.512])).pvalue > LEAST_P


def test_spans_depend_on_seed_sample_and_document_alone():
    text = _text(LENGTH)
    first, again = (_rule().row([text], 5) for _ in range(2))
    assert np.array_equal(first.tokens, again.tokens)
    others = _rule().row([text], 6), _rule(name="8/spans/train").row([text], 5)
    assert all(not np.array_equal(first.tokens, other.tokens) for other in others)
    job = make_test_plan(
        "model.family=t5", "model.num_kv_heads=num_heads", "data.seq_len=32",
        "model.encoder_decoder={num_encoder_layers: 2, decoder_seq_len: 8}",
        "data.span_corruption={text_seq_len: 26, first_sentinel_id: 255, eos_token_id: 64}",
    ).job  # fmt: skip
    assert span_corruption_of(job, "train").name != span_corruption_of(job, "valid").name
    samples = open_samples(job)
    assert samples.seq_len == 32
    assert not np.array_equal(samples.row(3).tokens, samples.row(3 + (1 << 16)).tokens)


def test_spans_have_the_published_distribution():
    """Each division of 6 tokens into 2 spans, and of 34 into 2 gaps, is as likely as the others."""
    stats = pytest.importorskip("scipy.stats")
    rule, sizes, places = _rule(), np.zeros(5), np.zeros(33)
    for sample in range(4000):
        spans = rule.segments(LENGTH, rule._random(sample, 0))
        assert len(spans) == 2
        assert spans[0][0] > 0, "a text begins with a gap"
        assert spans[-1][1] == LENGTH, "and ends with a span"
        sizes[spans[0][1] - spans[0][0] - 1] += 1
        places[spans[0][0] - 1] += 1
    assert stats.chisquare(sizes).pvalue > LEAST_P
    assert stats.chisquare(places).pvalue > LEAST_P


@pytest.mark.wide
def test_spans_have_the_distributions_of_megatron_core():
    """Its dataset draws with another generator: lengths, places and counts of spans have the same shares."""
    stats = pytest.importorskip("scipy.stats")
    t5 = pytest.importorskip("megatron.core.datasets.t5_dataset")
    tokenizer = SimpleNamespace(
        cls=-1, sep=-1, mask=-2, bos=START, eos=EOS, inv_vocab=dict.fromkeys(range(100), "x"),
        additional_special_tokens_ids=list(range(FIRST, FIRST - 50, -1)),
    )  # fmt: skip
    config = SimpleNamespace(
        tokenizer=tokenizer, masking_probability=0.15, masking_max_ngram=10, masking_do_full_word=False,
        masking_use_longer_ngrams=False, masking_use_geometric_distribution=True, masking_do_permutation=False,
    )  # fmt: skip
    kind = t5.T5MaskedWordPieceDataset
    theirs = SimpleNamespace(config=config)
    theirs._get_token_mask = lambda state: kind._get_token_mask(theirs, state)
    text, state, rule = _text(LENGTH), np.random.RandomState(3), _rule(span_lengths="geometric")
    lengths, places, counts = np.zeros((2, 11)), np.zeros((2, LENGTH)), np.zeros((2, 12))
    for sample in range(4000):
        found = kind._create_masked_lm_predictions(theirs, text.tolist(), LENGTH, state)[4]
        mine = rule.geometric(LENGTH, 40, rule._random(sample, 0))
        for side, spans in enumerate(
            ([range(*span) for span in mine], [each[0] for each in found])
        ):
            counts[side, len(spans)] += 1
            for span in spans:
                lengths[side, len(span)] += 1
                places[side, list(span)] += 1
    for table in (lengths, places, counts):
        seen = table[:, table.sum(0) > 10]
        assert stats.chi2_contingency(seen).pvalue > LEAST_P
