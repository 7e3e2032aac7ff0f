import pytest

from raymega.config.load import parse_job
from raymega.data.checks import data_faults, dataset_identity, training_faults
from tests.support.jobs import VERIFY
from tests.unit.data.datasets import write_dataset


def _texts(path, *, seq_len=8, vocab_size=257, **wants):
    faults = data_faults(str(path), seq_len=seq_len, vocab_size=vocab_size, **wants)
    return [str(fault) for fault in faults]


def test_good_dataset_has_no_fault(tmp_path):
    write_dataset(tmp_path)
    assert _texts(tmp_path) == []


def test_synthetic_asks_only_for_its_vocabulary():
    assert _texts("synthetic", vocab_size=64) == []
    (text,) = _texts("synthetic", vocab_size=63)
    assert text.startswith("model.vocab_size=63; ") and "at least 64" in text


def test_missing_path_is_answered_with_the_command_that_makes_it(tmp_path):
    (text,) = _texts(tmp_path / "none", vocab_size=512)
    command = f"`raymega data prepare INPUT... --out {tmp_path}/none --tokenizer bpe:512`"
    assert "does not exist" in text and command in text


def test_raw_text_is_answered_with_the_command_that_prepares_it(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("raw")
    for path in (tmp_path / "corpus", tmp_path / "corpus/a.txt"):
        (text,) = _texts(path)
        assert f"`raymega data prepare {path} --out {path}-tokens --tokenizer bpe:257`" in text


def test_all_faults_are_reported_at_once(tmp_path):
    write_dataset(tmp_path, train=(50, 30), valid=(20,))
    (tmp_path / "train/000001.arrow").unlink()
    texts = _texts(tmp_path, seq_len=20, vocab_size=256, splits=("train", "valid"))
    assert [text.partition(";")[0] for text in texts] == [
        "model.vocab_size=256",
        f"the valid split of {tmp_path} has 20 tokens",
        f"{tmp_path}/train/000001.arrow does not exist",
    ]


def test_short_split_that_nobody_reads_is_no_fault(tmp_path):
    write_dataset(tmp_path, train=(50,), valid=(20,))
    assert _texts(tmp_path, seq_len=32) == []
    (text,) = _texts(tmp_path, seq_len=32, splits=("train", "valid"))
    assert text.startswith("the valid split of")
    write_dataset(tmp_path, train=(20,), valid=(50,))
    assert _texts(tmp_path, seq_len=32, splits=("valid",)) == []


def test_unfit_paths_become_faults(tmp_path):
    assert "scheme 'gs' is unknown" in _texts("gs://bucket/tokens")[0]
    (tmp_path / "dataset.json").write_text("{}")
    assert "not a description of version 1 to 3" in _texts(tmp_path)[0]


def test_identity_follows_the_content_and_not_the_place(tmp_path):
    for name in ("here", "there", "other"):
        (tmp_path / name).mkdir()
    write_dataset(tmp_path / "here")
    write_dataset(tmp_path / "there")
    write_dataset(tmp_path / "other", train=(50, 31))
    here, there, other = (
        dataset_identity(str(tmp_path / name)) for name in ("here", "there", "other")
    )
    assert here == there != other
    assert dataset_identity("synthetic") == "synthetic"


def _blend_texts(tmp_path, sources, *, more=(), **values):
    """Faults of a job on a blend of datasets below ``tmp_path``."""
    text = ", ".join(f"{{path: {tmp_path}/{name}, {rest}}}" for name, rest in sources.items())
    overrides = ["data.path=none", f"data.sources=[{text}]", "data.seq_len=8", *more]
    parsed = parse_job(
        VERIFY,
        [*overrides, "data.global_batch_size=10", "run.eval_samples=0", "model.vocab_size=257"],
    )
    assert not parsed.faults
    return [str(fault) for fault in training_faults(parsed.values | values)]


@pytest.fixture
def datasets(tmp_path):
    """Datasets of 31 and 12 windows of 8 tokens, and a copy of the first."""
    for name, length in {"a": 250, "b": 100, "copy": 250}.items():
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name, train=(length,))
    return tmp_path


def test_dataset_under_two_names_is_refused(datasets):
    assert _blend_texts(datasets, {"a": "weight: 1", "b": "weight: 1"}) == []
    (text,) = _blend_texts(datasets, {"a": "weight: 1", "copy": "weight: 1"})
    assert f"data.sources[1].path='{datasets}/copy' is the dataset data.sources[0].path=" in text


def test_every_dataset_of_a_blend_is_checked(datasets):
    texts = _blend_texts(datasets, {"a": "weight: 1", "none": "weight: 1", "nor": "weight: 1"})
    assert [text.partition("=")[0] for text in texts] == [
        "data.sources[1].path",
        "data.sources[2].path",
    ]


def test_other_tokenizer_is_refused(datasets):
    for name in ("a", "b"):
        (datasets / name / "tokenizer.json").write_text(name)
    (text,) = _blend_texts(datasets, {"a": "weight: 1", "b": "weight: 1"})
    assert "has another tokenizer.json than" in text and "data.sources[1].path=" in text


def test_other_tokenizer_of_a_validation_set_is_refused(datasets):
    """A vocabulary of equal size, as of two runs of `bpe:N`, has other tokens: the loss would mean nothing."""
    for name in ("a", "b"):
        (datasets / name / "tokenizer.json").write_text(name)
    held_out = f"data.validation=[{{name: x, path: {datasets}/b}}]"
    parsed = parse_job(
        VERIFY,
        [f"data.path={datasets}/a", held_out, "data.seq_len=8", "model.vocab_size=257", "run.eval_samples=2"],
    )  # fmt: skip
    (text,) = map(str, training_faults(parsed.values))
    assert text.startswith(f"data.validation[0].path='{datasets}/b' has another tokenizer.json")
    assert training_faults(parsed.values | {"run.eval_samples": 0}) == []


@pytest.mark.parametrize("limit, is_refused", [(2, False), (1.99, True), (0, False)])
def test_run_that_exceeds_the_epochs_of_a_source_is_refused(datasets, limit, is_refused):
    """48 samples with every second one from b: 24 of its 12 windows."""
    texts = _blend_texts(
        datasets,
        {"a": "weight: 1", "b": f"weight: 1, max_epochs: {limit}"},
        **{"run.steps": 4, "data.global_batch_size": 12},
    )
    assert bool(texts) == is_refused
    if is_refused:
        assert "is read 2 times in the run's first 48 samples" in texts[0]
        assert "max_epochs=1.99, and it has 12 sequences of data.seq_len=8" in texts[0]


def test_epochs_count_from_the_begin_of_the_run_to_the_end_of_a_stage(datasets):
    stages = f"[{{from_tokens: 160, sources: [{{path: {datasets}/b, max_epochs: 2}}]}}]"
    sources = {"a": "weight: 1", "b": "weight: 1, max_epochs: 1"}
    # 10 of b in the first stage's 20 samples, then b alone: 14 more fill two epochs
    assert _blend_texts(datasets, sources, more=[f"data.stages={stages}"], **{"run.steps": 3}) == []
    (text,) = _blend_texts(datasets, sources, more=[f"data.stages={stages}"], **{"run.steps": 4})
    assert "is read 2.5 times in the run's first 40 samples" in text


def test_validation_sets_are_checked_where_the_job_evaluates(datasets):
    sets = f"data.validation=[{{name: x, path: {datasets}/a}}, {{name: y, path: {datasets}/none}}]"
    sources = {"a": "weight: 1"}
    assert _blend_texts(datasets, sources, more=[sets]) == []
    (text,) = _blend_texts(datasets, sources, more=[sets], **{"run.eval_samples": 4})
    assert text.startswith("data.validation[1].path=")
