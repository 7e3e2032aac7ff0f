"""Batches, engines and the tokens around documents, in preparations that are resumed."""

import pytest

from raymega.data.format import TOKENIZER_CONFIG_FILE
from raymega.data.inspect import inspect_dataset
from raymega.errors import ConfigError
from raymega.prepare import pipeline, shards
from raymega.prepare.origins import trace
from raymega.prepare.shards import GroupDone
from raymega.prepare.tokenizer.encoder import Encoder
from tests.unit.prepare import corpora
from tests.unit.prepare.corpora import content, prepared
from tests.unit.prepare.tokenizer.files import write_llama3_like

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")
LIAR = 5


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(corpora.json_lines(corpora.texts()))
    return tmp_path / "corpus.jsonl"


@pytest.fixture
def two_engines(monkeypatch):
    """The engine gigatoken, with the ids of tokenizers, and (group, is_fast) of the tasks."""
    ran, write_group = [], pipeline.write_group

    def open_encoder(text, rules, *, is_fast):
        encoder = Encoder(text, rules)
        encoder.engine = "gigatoken" if is_fast else "tokenizers"
        return encoder

    def write(group, *, is_fast, **options):
        ran.append((group.index, is_fast))
        return write_group(group, is_fast=is_fast, **options)

    monkeypatch.setattr(shards, "open_encoder", open_encoder)
    monkeypatch.setattr(pipeline, "write_group", write)
    return ran


@pytest.fixture
def disproved(two_engines, monkeypatch):
    """The same, where the engines differ on the group with number LIAR."""
    write_group = pipeline.write_group

    def write(group, *, is_fast, **options):
        done = write_group(group, is_fast=is_fast, **options)
        differs = is_fast and group.index == LIAR
        return GroupDone(index=LIAR, is_disproved=True) if differs else done

    monkeypatch.setattr(pipeline, "write_group", write)
    return two_engines


def test_size_of_batches_does_not_change_the_dataset(corpus, tmp_path, monkeypatch):
    for size in (1, 3000, 1 << 20):
        monkeypatch.setattr(shards, "BATCH_BYTES", size)
        prepared(corpus, tmp_path / f"{size}")
    found = [content(tmp_path / f"{size}") for size in (1, 3000, 1 << 20)]
    assert found[0] == found[1] == found[2]


def test_finished_groups_are_good_for_every_engine(corpus, tmp_path, two_engines, monkeypatch):
    done = prepared(corpus, tmp_path / "undisturbed")
    num_groups = len(two_engines)
    assert done.engines == {"gigatoken": num_groups}
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "plan_shards", _killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(corpus, tmp_path / "out")
    # Continued where gigatoken is not installed: nothing is done again.
    two_engines.clear()
    monkeypatch.setattr(shards, "open_encoder", lambda text, rules, **_: Encoder(text, rules))
    assert prepared(corpus, tmp_path / "out").engines == {"gigatoken": num_groups}
    assert not two_engines and content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_engine_that_is_disproved_in_one_group_leaves_no_token(corpus, tmp_path, disproved):
    done = prepared(corpus, tmp_path / "out")
    fast = [index for index, is_fast in disproved if is_fast]
    slow = [index for index, is_fast in disproved if not is_fast]
    assert fast == list(range(LIAR + 1)) and slow == list(range(len(slow))) and len(slow) > LIAR + 1
    assert done.engines == {"tokenizers": len(slow)}
    verified = inspect_dataset(done.uri, is_verified=True, on_shard=lambda *_: None)
    assert verified == done.meta and not (tmp_path / "out" / "_state").exists()


def test_disproof_outlives_a_kill(corpus, tmp_path, disproved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "plan_shards", _killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(corpus, tmp_path / "out")
    num_slow = sum(not is_fast for _, is_fast in disproved)
    disproved.clear()
    assert prepared(corpus, tmp_path / "out").engines == {"tokenizers": num_slow}
    assert not disproved


def test_late_task_of_the_disproved_engine_changes_nothing(
    corpus, tmp_path, disproved, monkeypatch
):
    """It ends, record and all, after its group was written again."""
    run_groups, late = pipeline._run_groups, []

    def run(groups, output, options, rules, *, is_fast):
        if is_fast:
            late.append((groups[:2], output, options, rules))
        yield from run_groups(groups, output, options, rules, is_fast=is_fast)
        if not is_fast:
            list(run_groups(*late[0], is_fast=True))

    prepared(corpus, tmp_path / "undisturbed")
    monkeypatch.setattr(pipeline, "_run_groups", run)
    done = prepared(corpus, tmp_path / "out")
    assert late and set(done.engines) == {"tokenizers"}
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_tokens_around_documents_are_part_of_the_recipe(corpus, tmp_path, two_engines):
    bad = tmp_path / "corpus"
    bad.mkdir()
    corpus.rename(bad / "a.jsonl")
    (bad / "b.jsonl").write_bytes(b"{\n")
    tokenizer = str(write_llama3_like(tmp_path / "tokenizer"))
    changes = ({}, {"add_bos": True}, {"parse_special_tokens": True}, {"eod_token": "<turn>"})
    for change in changes:
        two_engines.clear()
        with pytest.raises(ConfigError, match="max-bad-lines"):
            prepared(bad, tmp_path / "out", tokenizer=tokenizer, **change)
        # None of another recipe's groups is taken.
        assert [index for index, _ in two_engines] == list(range(len(two_engines)))
        assert len(two_engines) > LIAR
    (bad / "b.jsonl").unlink()
    done = prepared(bad, tmp_path / "out", tokenizer=tokenizer, **changes[-1])
    assert TOKENIZER_CONFIG_FILE in done.meta.tokenizer.files
    assert all((tmp_path / "out" / name).is_file() for name in done.meta.tokenizer.files)
    with pytest.raises(ConfigError, match="another recipe"):
        prepared(bad, tmp_path / "out", tokenizer=tokenizer)


def test_origins_count_documents_that_begin_with_a_token(corpus, tmp_path):
    tokenizer = str(write_llama3_like(tmp_path / "tokenizer"))
    done = prepared(corpus, tmp_path / "out", tokenizer=tokenizer, add_bos=True, valid_fraction=0.0)
    split = done.meta.splits["train"]
    last = trace(done.uri, done.meta, split="train", token=split.num_tokens - 1)
    assert trace(done.uri, done.meta, split="train", token=0).row == 0
    assert (last.document, last.row) == (split.num_documents - 1, corpora.NUM_TEXTS - 1)


def _killed(*_):
    raise KeyboardInterrupt
