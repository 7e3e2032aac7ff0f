from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from raymega.checkpoint.format import commit_log
from raymega.checkpoint.format.epochs import log_key
from raymega.checkpoint.format.keys import COMMITTED, ROOT
from raymega.checkpoint.format.manifest import list_manifests, read_manifest
from raymega.errors import StorageError
from raymega.events import CheckpointCommitted, SaveFailed
from raymega.orchestrate.driver.checkpoint_committer import CheckpointCommitter
from tests.support.fakes import FakeClock, FakeWorkerGroup, FakeWorkers, InlineExecutor
from tests.support.jobs import make_test_plan
from tests.support.memory_store import MemoryStore


def make_saves(store, executor=None, keep_last=3, steps=40, **others):
    plan = make_test_plan(
        "parallel.dp=2", "parallel.pp=1", f"checkpoint.keep_last={keep_last}", f"run.steps={steps}"
    )
    return CheckpointCommitter(
        plan=plan,
        attempt=1,
        store=store,
        executor=executor or InlineExecutor(),
        clock=FakeClock(),
        **others,
    )


def save(saves, store, step, **kwargs):
    group = FakeWorkerGroup(FakeClock(), store, world_size=2, script=[])
    for reports in FakeWorkers(2, step=step).save(**kwargs):
        group.write_files(reports)
        for report in reports:
            saves.handle_report(report)


@pytest.fixture
def store():
    return MemoryStore()


def test_add_commits_when_every_rank_has_written(store):
    saves, workers = make_saves(store), FakeWorkers(2, step=10)
    saves.handle_report(workers.shard(1))
    assert saves.pop_outcomes() == [] and list_manifests(store) == []
    saves.handle_report(workers.shard(0))
    (outcome,) = saves.pop_outcomes()
    key = "checkpoints/step-00000010/manifest-a0001.json"
    assert outcome == CheckpointCommitted(
        step=10,
        uri=f"memory:/{key}",
        stall_s=0.5,
        save_s=1.5,
        num_bytes=16,
    )
    manifest = read_manifest(store, key)
    assert (manifest.step, manifest.grid["dp"], manifest.job["run"]["name"]) == (10, 2, "verify")
    assert saves.pop_outcomes() == []


def test_checkpoints_remember_what_the_run_reads_in_each_restart(store):
    sources = {"checkpoint.init_from": "0123abcd"}
    save(make_saves(store, sources=sources), store, 10)
    (key,) = list_manifests(store)
    assert read_manifest(store, key).job["sources"] == sources


def test_add_refuses_a_save_that_one_rank_could_not_write(store):
    saves = make_saves(store)
    save(saves, store, 10, errors=[1])
    (outcome,) = saves.pop_outcomes()
    assert isinstance(outcome, SaveFailed) and outcome.step == 10
    assert "rank 1 failed: disk full" in outcome.reason and saves.error == "rank 1: disk full"
    assert list(store.list("")) == [], "what rank 0 wrote gives its room back"


def test_add_reports_a_store_that_fails(store, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise StorageError("no space left")

    monkeypatch.setattr(store, "put", refuse)
    saves, workers = make_saves(store), FakeWorkers(2, step=10)
    for rank in (0, 1):
        saves.handle_report(workers.shard(rank))
    assert saves.pop_outcomes() == [SaveFailed(step=10, reason="no space left")]


@pytest.mark.parametrize("num_failures, is_saved", [(2, True), (21, False)])
def test_commit_of_the_last_step_is_tried_until_the_store_recovers(num_failures, is_saved, monkeypatch):  # fmt: skip
    class Refusing(MemoryStore):
        left = num_failures

        def put(self, key, chunks, *, overwrite):
            if "manifest" in key and self.left:
                self.left -= 1
                raise StorageError("no space left")
            super().put(key, chunks, overwrite=overwrite)

    monkeypatch.setattr("raymega.orchestrate.driver.checkpoint_committer.COMMIT_PAUSE_S", 0.0)
    store = Refusing()
    saves = make_saves(store, steps=10)
    save(saves, store, 10)
    (outcome,) = saves.pop_outcomes()
    assert isinstance(outcome, CheckpointCommitted if is_saved else SaveFailed)
    assert saves.error == ("" if is_saved else "no space left")


def test_commit_that_is_tried_again_ends_with_the_attempt(monkeypatch):
    store = MemoryStore()
    saves = make_saves(store, steps=10)

    def refuse(*_args, **_kwargs):
        saves.end(0)
        raise StorageError("no space left")

    monkeypatch.setattr(store, "put", refuse)
    workers = FakeWorkers(2, step=10)
    for rank in (0, 1):
        saves.handle_report(workers.shard(rank))
    (outcome,) = saves.pop_outcomes()
    assert "the attempt ended" in outcome.reason


def test_old_checkpoints_are_deleted_after_a_commit(store):
    saves = make_saves(store, keep_last=2)
    for step in (10, 20, 30):
        save(saves, store, step)
    assert [key.split("/")[1] for key in list_manifests(store)] == [
        "step-00000030",
        "step-00000020",
    ]


def test_only_the_first_commit_of_an_attempt_lists_the_catalogue(store, monkeypatch):
    asked, listing = [], store.list
    monkeypatch.setattr(store, "list", lambda prefix: asked.append(prefix) or listing(prefix))
    saves, found = make_saves(store, keep_last=2), []
    for step in (10, 20, 30, 40):
        asked.clear()
        save(saves, store, step)
        found.append({ROOT, COMMITTED} & {*asked})
    assert found == [{ROOT, COMMITTED}, set(), set(), set()]
    assert len(list_manifests(store)) == 2


def test_commit_is_in_the_log_before_its_manifest_where_checkpoints_are_many(store, monkeypatch):
    monkeypatch.setattr(commit_log, "FEW_CHECKPOINTS", 1)
    saves, puts, real = make_saves(store), [], store.put
    monkeypatch.setattr(store, "put", lambda key, *a, **b: (puts.append(key), real(key, *a, **b)))
    for step in (10, 20):
        save(saves, store, step)
    log, manifest = log_key(1), "checkpoints/step-00000020/manifest-a0001.json"
    assert puts.index(log) < puts.index(manifest) and puts.count(log) == 1, "one alone is listed"
    assert b'"pending": [{"attempt": 1, "every": 1, "first": 20, "last": 20}]' in store.get(log)


def test_commit_does_not_block_the_caller():
    gate = Event()

    class SlowStore(MemoryStore):
        def put(self, key, chunks, *, overwrite):
            gate.wait(100)
            super().put(key, chunks, overwrite=overwrite)

    with ThreadPoolExecutor(1) as executor:
        saves, workers = make_saves(SlowStore(), executor), FakeWorkers(2, step=10)
        for rank in (0, 1):
            saves.handle_report(workers.shard(rank))
        assert not saves.is_idle and saves.pop_outcomes() == []
        gate.set()
        saves.end(100)
        assert [outcome.step for outcome in saves.pop_outcomes()] == [10]
        assert saves.is_idle
