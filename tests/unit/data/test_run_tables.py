"""Numbers of packed rows that the nodes of a run share: counted on one, read by the others."""

import pytest

from raymega.config.load import parse_job
from raymega.data import open_split as opening
from raymega.data import packing
from raymega.data.samples import open_samples
from raymega.errors import StorageError
from raymega.storage.local import LocalStore
from raymega.storage.store import DelegatingStore
from tests.support.jobs import VERIFY
from tests.unit.data.datasets import with_lengths, write_documents


class Away(DelegatingStore):
    def get(self, key, **_):
        raise StorageError(fact="the store is away", rule="it answers", remedy="wait")

    def put(self, key, chunks, *, overwrite):
        self.get(key)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A packed job whose documents are enough to be counted once."""
    monkeypatch.setattr(opening, "SHARED_DOCUMENTS", 1)
    with_lengths(tmp_path / "made", write_documents(tmp_path / "made", num_shards=3, per_shard=50))
    settings = [f"data.path={tmp_path / 'made'}", "data.packing=best_fit", "model.vocab_size=257", "data.packing_window=8"]  # fmt: skip
    return parse_job(VERIFY, [*settings, "run.eval_samples=0"]).job()


@pytest.fixture
def counted(monkeypatch):
    """Notes each time that rows are counted."""
    times, count = [], packing.window_rows
    monkeypatch.setattr(
        packing, "window_rows", lambda *args, **how: (times.append(1), count(*args, **how))[1]
    )
    return times


@pytest.fixture
def on_node(tmp_path, monkeypatch, job):
    """Opens the data on a node of its own, and returns what tells the order of its rows."""

    def open_there(name, run=None):
        monkeypatch.setenv("HOME", str(tmp_path / name))
        samples = open_samples(job, run=run)
        return [samples.row(sample).tokens.tolist() for sample in range(20)], samples.efficiency

    return open_there


def test_second_node_of_a_run_counts_nothing(on_node, counted, tmp_path):
    run, wanted = LocalStore(tmp_path / "run"), on_node("alone")
    assert on_node("first", run) == wanted and len(counted) == 2
    (key,) = run.list("")
    assert key.startswith("packing/")
    assert on_node("second", run) == wanted and len(counted) == 2


@pytest.mark.parametrize("damage", [b"", b"no table", "torn", "flipped"])
def test_damaged_copy_is_counted_and_written_anew(on_node, counted, tmp_path, damage):
    run = LocalStore(tmp_path / "run")
    wanted = on_node("first", run)
    (key,) = run.list("")
    whole = run.get(key)
    changed = bytearray(whole)
    # a byte of the first array
    changed[whole.index(b"\n") + 3] ^= 1
    content = {"torn": whole[:-9], "flipped": bytes(changed)}.get(damage, damage)
    run.put(key, [content], overwrite=True)
    assert on_node("second", run) == wanted and len(counted) == 2
    assert run.get(key) == whole


def test_store_that_is_away_costs_a_count(on_node, counted, tmp_path):
    assert on_node("first", Away(LocalStore(tmp_path / "run"))) == on_node("alone")
    assert len(counted) == 2 and not (tmp_path / "run").exists()


def test_few_documents_are_counted_without_a_request(on_node, counted, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "SHARED_DOCUMENTS", 1000)
    on_node("first", Away(LocalStore(tmp_path / "run")))
    assert len(counted) == 1
