"""Evaluation of a run under way, which may prune its newest checkpoint while the workers start."""

import pytest

from raymega.checkpoint.format.manifest import Manifest, commit, list_manifests
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.errors import ConfigError, WorkerError
from raymega.evaluate import run
from raymega.evaluate.run import Evaluation
from raymega.evaluate.tasks.task import Questions
from raymega.plan.run_plan import make_plan
from raymega.storage.registry import open_store
from tests.unit.verify.jobs import make_job

GONE = WorkerError(fact="rank 0 failed", rule="the checkpoint must be there", remedy="look")


def _commit(store, step):
    manifest = Manifest(
        step=step, attempt=1, created="", state={}, job={}, grid={}, metrics={}, boxes=()
    )
    return commit(store, manifest)


@pytest.fixture
def ready(tmp_path):
    store = open_store(str(tmp_path))
    _commit(store, 1)
    questions = Questions(requests=[], judge=lambda _scores: ({"a": 1.0}, []), documents=1)
    return Evaluation(
        task="lambada", uri=str(tmp_path), checkpoint=open_checkpoint(str(tmp_path)),
        plan=make_plan(make_job()), questions=questions, mlflow_run=None,
    )  # fmt: skip


def _workers(monkeypatch, on_score):
    asked = []

    def score(checkpoint, _plan, _requests, *, on_rows):
        asked.append(checkpoint.manifest.step)
        on_score(checkpoint)
        return []

    monkeypatch.setattr(run, "score", score)
    return asked


def test_the_newest_checkpoint_takes_the_place_of_one_that_was_pruned(ready, monkeypatch):
    def prune(checkpoint):
        if checkpoint.manifest.step == 1:
            _commit(checkpoint.store, 2)
            checkpoint.store.delete(checkpoint.manifest.key)
            raise GONE

    asked = _workers(monkeypatch, prune)
    assert ready.run(lambda *_: None).step == 2 and asked == [1, 2]


def test_another_failure_stands_and_a_run_without_checkpoints_is_told(ready, monkeypatch):
    def fail(_checkpoint):
        raise GONE

    asked = _workers(monkeypatch, fail)
    with pytest.raises(WorkerError):
        ready.run(lambda *_: None)
    assert asked == [1] and len(list_manifests(ready.checkpoint.store)) == 1

    def prune(checkpoint):
        checkpoint.store.delete(checkpoint.manifest.key)
        raise GONE

    _workers(monkeypatch, prune)
    with pytest.raises(ConfigError):
        ready.run(lambda *_: None)
