"""Megatron's files: read in place, written byte for byte as Megatron's own builder writes them.

The tests named ``witness`` need megatron-core 0.16.1 (``pip install --no-deps megatron-core==0.16.1``).
"""

from dataclasses import replace

import numpy as np
import pytest

from raymega.data.arrow import ShardWriter, token_dtype
from raymega.data.checks import data_faults, dataset_identity
from raymega.data.export import export_megatron, index_bytes
from raymega.data.format import (
    META_FILE,
    DatasetMeta,
    SourceMeta,
    SplitMeta,
    encode_meta,
    read_meta,
)
from raymega.data.megatron import MegatronStream, megatron_dtype
from raymega.data.open_split import Shape, open_split
from raymega.errors import ConfigError, DataError
from tests.support.jobs import make_test_plan

VOCABULARIES = (257, 50_257, 65_499, 65_500, 65_520, 65_536, 128_256)
SHAPE = Shape(seq_len=16)


def _documents(vocab_size, *, number=40):
    random = np.random.default_rng(vocab_size)
    lengths = random.integers(1, 60, number)
    found = [random.integers(0, vocab_size, length) for length in lengths]
    found[0][0] = vocab_size - 1
    return found


def _dataset(folder, documents, vocab_size, *, cut=7):
    """A prepared dataset of one shard or two with these documents."""
    shards, dtype = [], token_dtype(vocab_size)
    for number, part in enumerate(filter(None, (documents[:cut], documents[cut:]))):
        with ShardWriter(folder, f"train/{number:06d}.arrow", dtype=dtype) as writer:
            for document in part:
                writer.append(document.astype(dtype))
            shards.append(writer.close())
    meta = DatasetMeta(
        recipe={"tokenizer": "x"},
        vocab_size=vocab_size,
        eod_id=0,
        dtype=dtype,
        splits={"train": SplitMeta(shards=tuple(shards), num_text_bytes=1)},
        valid_entropy=-1.0,
        source=SourceMeta(
            inputs=(), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
        ),
    )
    (folder / META_FILE).write_bytes(encode_meta(meta))


@pytest.fixture(params=VOCABULARIES)
def exported(request, tmp_path):
    """Documents, vocabulary, folder of the dataset, and the prefix of what was exported."""
    documents, folder = _documents(request.param), tmp_path / "tokens"
    folder.mkdir()
    _dataset(folder, documents, request.param)
    prefix = str(tmp_path / "out" / "corpus")
    export_megatron(str(folder), prefix, split="train", on_progress=lambda *_: None)
    return documents, request.param, folder, prefix


def _bytes(prefix):
    return [(prefix.parent / f"{prefix.name}.{end}").read_bytes() for end in ("bin", "idx")]


def _write(folder, documents, dtype):
    """Megatron's files of these documents, by this project's writer."""
    prefix = folder / "by-hand"
    (folder / "by-hand.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    lengths = np.array([len(document) for document in documents])
    (folder / "by-hand.idx").write_bytes(index_bytes(lengths, dtype))
    return prefix


@pytest.mark.parametrize(
    "vocab_size, dtype", [(257, "uint16"), (65_499, "uint16"), (65_500, "int32"), (65_520, "int32")]
)
def test_type_of_tokens_is_megatrons(vocab_size, dtype):
    assert megatron_dtype(vocab_size) == dtype


def test_index_is_pinned():
    """Bytes that megatron-core 0.16.1 wrote for documents of 2, 3 and 1 tokens."""
    assert index_bytes(np.array([2, 3, 1]), "uint16").hex() == (
        "4d4d494449445800000100000000000000080300000000000000040000000000000002000000030000000100"
        "000000000000000000000400000000000000"
        "0a000000000000000000000000000000010000000000000002000000000000000300000000000000"
    )


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_rows_of_exported_files_are_those_of_the_dataset(exported, tmp_path, packing):
    documents, vocab_size, _, prefix = exported
    folder = tmp_path / "one"
    folder.mkdir()
    _dataset(folder, documents, vocab_size, cut=len(documents))
    shape = Shape(seq_len=16, packing=packing, window=64)
    ours = open_split(str(folder), "train", shape, seed=1)
    theirs = open_split(f"megatron:{prefix}", "train", shape, seed=1, vocab_size=vocab_size)
    assert ours.num_windows == theirs.num_windows
    for index in range(ours.num_windows):
        one, other = ours.row(index), theirs.row(index)
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.mask, other.mask)
        assert np.array_equal(one.labels, other.labels) and one.documents == other.documents


def test_stream_is_cut_into_shards_as_if_it_were_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr("raymega.data.megatron.SHARD_TOKENS", 50)
    prefix = _write(tmp_path, [np.arange(n) for n in (30, 20, 9, 120, 1, 2)], "uint16")
    shards = MegatronStream(str(prefix)).shards
    assert [(each.num_documents, each.num_tokens) for each in shards] == [(2, 50), (2, 129), (2, 3)]
    source = open_split(f"megatron:{prefix}", "train", SHAPE, seed=1)
    assert source.shards.rows.tolist() == [49 // SHAPE.seq_len, 128 // SHAPE.seq_len, 0]


@pytest.mark.parametrize("prefix", ["", "new/", "new/.", ".."])
def test_export_without_a_name_is_refused(prefix):
    """Its files were called .bin and .idx."""
    with pytest.raises(ConfigError, match=r"has no name for the files; .*corpus"):
        export_megatron("nowhere", prefix, split="train", on_progress=lambda *_: None)


def test_parts_are_counted_by_one_process_of_a_node(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("raymega.data.megatron.SHARD_TOKENS", 50)
    prefix = _write(tmp_path, [np.arange(n) for n in (30, 20, 9, 120, 1, 2)], "uint16")
    alone = MegatronStream(str(prefix)).shards
    assert not (tmp_path / "home").exists()  # of few documents each process counts them
    monkeypatch.setattr("raymega.data.megatron.SHARED_DOCUMENTS", 2)
    assert MegatronStream(str(prefix)).shards == alone
    monkeypatch.setattr(MegatronStream, "document_lengths", None)
    assert MegatronStream(str(prefix)).shards == alone


def test_export_overwrites_nothing(exported):
    *_, folder, prefix = exported
    with pytest.raises(ConfigError, match=r"corpus\.bin exists.*\n?.*corpus\.idx exists"):
        export_megatron(str(folder), prefix, split="train", on_progress=lambda *_: None)
    with pytest.raises(ConfigError, match="has no valid split"):
        export_megatron(str(folder), f"{prefix}2", split="valid", on_progress=lambda *_: None)


@pytest.mark.parametrize("row_format", ["preference", "kto", "classification", "multiple_choice"])
def test_rows_with_labels_are_not_exported_as_text(exported, tmp_path, row_format):
    *_, folder, _ = exported
    meta = replace(read_meta(folder), version=3, row_format=row_format)
    (folder / META_FILE).write_bytes(encode_meta(meta))
    with pytest.raises(
        ConfigError, match=f"are of format {row_format}; Megatron's files hold tokens"
    ):
        export_megatron(
            str(folder), str(tmp_path / "new"), split="train", on_progress=lambda *_: None
        )
    assert not [*tmp_path.glob("new*")]


def test_token_above_the_models_vocabulary_is_refused(tmp_path):
    prefix = _write(tmp_path, [np.arange(100)], "uint16")
    source = open_split(f"megatron:{prefix}", "train", SHAPE, seed=1, vocab_size=50)
    assert source.row(0).tokens[0] == 0
    with pytest.raises(DataError, match="holds token 64"):
        source.row(3)


def test_negative_token_of_a_damaged_file_is_refused(tmp_path):
    """Vocabulary-parallel embeddings would take it for a token of another rank."""
    tokens = np.arange(40)
    tokens[20] = -7
    prefix = _write(tmp_path, [tokens], "int32")
    source = open_split(f"megatron:{prefix}", "train", SHAPE, seed=1, vocab_size=50)
    with pytest.raises(DataError, match="holds token -7"):
        source.row(1)


@pytest.mark.parametrize("is_packed", [True, False])
def test_files_without_a_token_are_refused(tmp_path, is_packed):
    prefix = _write(tmp_path, [np.arange(0)], "uint16")
    (fault,) = data_faults(f"megatron:{prefix}", seq_len=8, vocab_size=0, is_packed=is_packed)
    assert "has 0 tokens" in fault.fact


def test_blend_of_prefixes_is_checked_like_any_other(tmp_path):
    (tmp_path / "x").mkdir()
    a = _write(tmp_path, [np.arange(100)], "uint16")
    b = _write(tmp_path / "x", [np.arange(100)], "int32")
    assert data_faults(f"megatron:{a}", seq_len=16, vocab_size=257) == []
    assert dataset_identity(f"megatron:{a}") != dataset_identity(f"megatron:{b}")
    job = make_test_plan(
        "data.path=none", f"data.sources=[{{path: 'megatron:{a}'}}, {{path: 'megatron:{b}'}}]"
    ).job
    assert job.data.datasets == {
        f"megatron:{a}": "data.sources[0].path",
        f"megatron:{b}": "data.sources[1].path",
    }


@pytest.mark.parametrize(
    "damage, fact",
    [
        (lambda prefix: prefix.with_suffix(".bin").unlink(), "by-hand.bin does not exist"),
        (
            lambda prefix: prefix.with_suffix(".bin").write_bytes(b"abc"),
            "has 3 bytes, and its .idx",
        ),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b"abc"), "by-hand.idx has 3 bytes"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b"x" * 99), "begins with 7878"),
        (lambda prefix: _patch(prefix, 26, 9), "bytes instead of"),
        (lambda prefix: _patch(prefix, 34 + 3 * 4 + 8, 99), "do not follow one another"),
        (lambda prefix: _patch(prefix, 34 + 3 * 12 + 8, 99), "document borders"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, fact):
    prefix = _write(tmp_path, [np.arange(30), np.arange(20), np.arange(9)], "uint16")
    damage(prefix)
    texts = [str(fault) for fault in data_faults(f"megatron:{prefix}", seq_len=8, vocab_size=0)]
    assert len(texts) == 1 and fact in texts[0]


def _patch(prefix, at, byte):
    path = prefix.with_suffix(".idx")
    content = bytearray(path.read_bytes())
    content[at] = byte
    path.write_bytes(content)


def test_short_files_and_files_without_held_out_text_are_refused(tmp_path):
    prefix = _write(tmp_path, [np.arange(9)], "uint16")
    faults = data_faults(f"megatron:{prefix}", seq_len=9, vocab_size=0, splits=("train", "valid"))
    texts = [str(fault) for fault in faults]
    assert len(texts) == 2 and "has no valid split" in texts[0] and "has 9 tokens" in texts[1]


def test_several_sequences_of_a_document_are_one_document(tmp_path):
    """As Megatron's --split-sentences writes them."""
    prefix = _write(tmp_path, [np.arange(5), np.arange(7), np.arange(2)], "int32")
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    # borders 0, 1, 2, 3 become 0, 0, 2, 3: an empty document, one of two sequences, one of one
    index[34 + 36 + 8] = 0
    prefix.with_suffix(".idx").write_bytes(index)
    assert MegatronStream(str(prefix)).document_lengths().tolist() == [12, 2]


@pytest.fixture
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def test_witness_megatron_writes_the_same_bytes(exported, megatron, tmp_path):
    documents, vocab_size, *_ = exported
    theirs = tmp_path / "theirs"
    builder = megatron.IndexedDatasetBuilder(
        f"{theirs}.bin", dtype=megatron.DType.optimal_dtype(vocab_size)
    )
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{theirs}.idx")
    assert _bytes(theirs) == _bytes(tmp_path / "out" / "corpus")


def test_witness_megatron_reads_what_is_written(exported, megatron):
    documents, _, _, prefix = exported
    theirs = megatron.IndexedDataset(prefix)
    assert len(theirs) == len(documents)
    for document, found in zip(documents, theirs, strict=True):
        assert np.array_equal(document, found)
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


def test_witness_blend_is_within_one_sample_of_megatrons():
    """Of 0.6, 0.3 and 0.1, at every prefix of 100,000."""
    from raymega.data.blends.blend import Blend

    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    weights, size = [0.6, 0.3, 0.1], 100_000
    theirs, ranks = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(theirs, ranks, np.array(weights), 3, size, False)
    blend = Blend(weights)
    ours = np.array([blend.place(sample)[0] for sample in range(size)])
    for source in range(3):
        difference = np.cumsum(ours == source) - np.cumsum(theirs == source)
        assert np.abs(difference).max() <= 1
