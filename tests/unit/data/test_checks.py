from raymega.data.checks import data_faults, dataset_identity
from tests.unit.data.datasets import write_dataset


def _texts(path, *, seq_len=8, vocab_size=257):
    return [str(fault) for fault in data_faults(str(path), seq_len=seq_len, vocab_size=vocab_size)]


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
    texts = _texts(tmp_path, seq_len=20, vocab_size=256)
    assert [text.partition(";")[0] for text in texts] == [
        "model.vocab_size=256",
        f"the valid split of {tmp_path} has 20 tokens",
        f"{tmp_path}/train/000001.arrow does not exist",
    ]


def test_unfit_paths_become_faults(tmp_path):
    assert "scheme 'gs' is unknown" in _texts("gs://bucket/tokens")[0]
    (tmp_path / "dataset.json").write_text("{}")
    assert "not a version 1 or 2 description" in _texts(tmp_path)[0]


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
