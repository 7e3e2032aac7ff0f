"""A run keeps the teacher that it began with, in each restart and each resume."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pytest import MonkeyPatch

from raymega.api import load_job
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.load import pinned_source
from raymega.checkpoint.load.fingerprint import (
    FINGERPRINT,
    SOURCES,
    fingerprint_at,
    fingerprint_of,
    origin_faults,
    sources_of,
)
from raymega.checkpoint.load.foreign_reads import foreign_read
from raymega.checkpoint.load.init_from import ADAPTER
from raymega.checkpoint.load.pinned_source import TEACHER, pin_faults, pinned, teacher_faults
from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint, open_root
from raymega.config.schema import CheckpointSection
from raymega.convert.native import write_weights
from raymega.data.distillation.stored_logits import logit_files
from raymega.errors import CheckpointError, ConfigError, StorageError
from raymega.evaluate import training_tasks
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.plan.tensor_table import saved_tensors
from raymega.storage.registry import open_store
from tests.support.jobs import VERIFY, make_test_plan

DISTILLED = ("distillation.loss_type=forward_kl", "model.moe={}", "parallel.ep=1")
EARLY, LATE = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"


def _write(
    uri: Path,
    *,
    created: str = EARLY,
    teacher: str = "none",
    value: float = 0.0,
    sources: dict[str, str] | None = None,
    sets: tuple[str, ...] = (),
) -> str:
    """Write ``value`` as all weights, of a run whose teacher is ``teacher``; return the manifest's URI."""
    job = make_test_plan(*DISTILLED, f"{TEACHER}={teacher}", *sets).job
    key = write_weights(
        open_store(str(uri)), saved_tensors(job.model), lambda tensor: np.full(tensor.shape, value, np.float32),
        dtype="float32", job=job.model_dump(mode="json") | {SOURCES: sources or {}}, created=created,
    )  # fmt: skip
    return f"{uri}/{key}"


@pytest.mark.parametrize("is_at_work", [True, False])
def test_a_start_is_warned_of_a_run_that_deletes_what_it_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_at_work: bool
) -> None:
    """The run that trains there keeps its newest checkpoints only, and restarts would read one that is gone."""
    uri = _write(tmp_path / "teacher")
    store = open_store(str(tmp_path / "teacher"))
    lease = Lease(store, holder=this_process(), duration_s=60.0, clock=SystemClock())
    lease.acquire()
    lease.begin_attempt()
    if not is_at_work:
        lease.release()
    options = (*DISTILLED, f"checkpoint.uri={tmp_path}/runs", f"{TEACHER}={tmp_path}/teacher")
    with caplog.at_level("WARNING", logger="raymega"):
        load_job(VERIFY, options, is_for_training=True)
    told = [each.getMessage() for each in caplog.records if "raymega checkpoint copy" in each.msg]
    assert len(told) == is_at_work and all(f"{TEACHER}={uri} is of a run" in each for each in told)


def test_missing_files_of_others_are_told_with_what_deletes_them() -> None:
    with (
        pytest.raises(
            StorageError, match=r"copy of it \(raymega checkpoint copy\).*keep_last"
        ) as told,
        foreign_read(TEACHER, "there"),
    ):
        raise CheckpointError(fact="a file is missing", rule="it is there", remedy="an older one")
    assert "an older one" not in str(told.value)


def test_a_run_names_the_manifest_of_its_teacher(tmp_path: Path) -> None:
    began = _write(tmp_path / "teacher")
    options = (*DISTILLED, f"checkpoint.uri={tmp_path}/runs", f"{TEACHER}={tmp_path}/teacher")
    job = load_job(VERIFY, options, is_for_training=True)
    assert job.distillation.teacher_checkpoint == began
    # where the model has a teacher of no use, nothing is looked up
    off = load_job(VERIFY, [f"checkpoint.uri={tmp_path}/runs"], is_for_training=True)
    assert off.distillation.teacher_checkpoint == "none"


def _train_further(run: Path) -> None:
    """Commit the run's weights again, of a later step."""
    store, manifest = open_checkpoint(str(run))
    commit(store, replace(manifest, step=manifest.step + 9))


def _load(tmp_path: Path, *sets: str) -> CheckpointSection:
    options = ("model.moe={}", "parallel.ep=1", f"checkpoint.uri={tmp_path}/runs", *sets)
    return load_job(VERIFY, options, is_for_training=True).checkpoint


def test_ranks_of_a_new_run_start_from_one_checkpoint_though_another_is_committed(
    tmp_path: Path,
) -> None:
    """Each rank opens it by itself, and a run that still trains has another newest one at any time."""
    began = _write(tmp_path / "base")
    asked = f"checkpoint.init_from={tmp_path}/base"
    lora = (asked, "model.lora={r: 4}")
    of_adapters = _write(tmp_path / "adapters", sets=lora)
    whole, tuned = _load(tmp_path, asked), _load(tmp_path, *lora, f"{ADAPTER}={tmp_path}/adapters")
    for run in ("base", "adapters"):
        _train_further(tmp_path / run)
    assert (whole.init_from, whole.init_adapter) == (began, "none")
    assert (tuned.init_from, tuned.init_adapter) == (began, of_adapters)
    assert open_root(began).manifest.step == 0 != open_root(f"{tmp_path}/base").manifest.step


def test_a_run_with_checkpoints_of_its_own_looks_for_no_start(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    run, base = tmp_path / "runs" / "verify", f"{tmp_path}/base"
    began = _write(tmp_path / "base")
    _write(run, sets=(f"checkpoint.init_from={began}",))
    _train_further(tmp_path / "base")
    monkeypatch.setattr(pinned_source, "open_root", lambda uri: pytest.fail(f"{uri} is opened"))
    # it keeps what it began with, as long as the job names it, wherever that is by now
    assert _load(tmp_path, f"checkpoint.init_from={base}").init_from == began
    shutil.rmtree(base)
    assert _load(tmp_path, f"checkpoint.init_from={base}").init_from == began
    assert _load(tmp_path, f"checkpoint.init_from={base}2").init_from == f"{base}2"
    assert sources_of(load_job(VERIFY, [f"checkpoint.init_from={base}"])) == {}


def test_tokenizer_of_a_start_is_that_of_its_run(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A resume asks for it as well, and the checkpoint that the run began with may be deleted by then."""
    monkeypatch.setattr(
        training_tasks, "find_tokenizer", lambda it: f"{it.store.uri}/{it.manifest.key}"
    )
    began = _write(tmp_path / "base")
    gone = f"{tmp_path}/base/checkpoints/step-00000099/manifest-a0000.json"
    for start in (began, gone):
        job = make_test_plan(f"checkpoint.init_from={start}").job
        assert training_tasks._tokenizer_of_start(job, "corpus") == began


def test_a_run_that_resumes_with_another_teacher_is_refused(tmp_path: Path) -> None:
    began = _write(tmp_path / "teacher")
    _write(tmp_path / "run", teacher=began)
    own = open_store(str(tmp_path / "run"))
    assert pinned(str(tmp_path / "teacher"), own, field=TEACHER) == began
    assert [*pin_faults(began, own, field=TEACHER)] == []
    # imported models have equal keys, and were written at other times
    _write(tmp_path / "other", created=LATE)
    for wrong in (pinned(str(tmp_path / "other"), own, field=TEACHER), "none"):
        (fault,) = pin_faults(wrong, own, field=TEACHER)
        assert fault.fact == f"{TEACHER}={wrong!r}: the run was begun with {began}"
    # a teacher may be copied, and may move
    shutil.copytree(tmp_path / "teacher", tmp_path / "copy")
    copy = pinned(str(tmp_path / "copy"), own, field=TEACHER)
    assert [*pin_faults(copy, own, field=TEACHER)] == []
    shutil.rmtree(tmp_path / "teacher")
    assert [*pin_faults(copy, own, field=TEACHER)] == []


def test_a_teacher_that_is_not_there_has_another_remedy_than_one_of_another_model(
    tmp_path: Path,
) -> None:
    model = make_test_plan(*DISTILLED).job.model
    (fault,) = teacher_faults(str(tmp_path / "nowhere"), model)
    assert f"of the teacher: {TEACHER}=" in fault.fact and "teacher_model" not in fault.remedy
    _write(tmp_path / "teacher")
    assert teacher_faults(str(tmp_path / "teacher"), model) == []
    wider = model.model_copy(update={"hidden_size": 2 * model.hidden_size})
    assert all("set distillation.teacher_model" in fault.remedy
               for fault in teacher_faults(str(tmp_path / "teacher"), wider))  # fmt: skip


def test_an_overwritten_teacher_and_logits_of_another_one_are_refused(tmp_path: Path) -> None:
    began = _write(tmp_path / "teacher")
    job = make_test_plan(*DISTILLED, f"{TEACHER}={began}").job
    how = {"checkpoint": began, FINGERPRINT: sources_of(job)[TEACHER]}
    _write(tmp_path / "run", teacher=began, sources=sources_of(job))
    own = open_store(str(tmp_path / "run"))
    shutil.copytree(tmp_path / "teacher", tmp_path / "copy")
    assert [*pin_faults(began, own, field=TEACHER)] == []
    assert [*origin_faults("corpus", how, began)] == []
    # other weights in its place
    shutil.rmtree(tmp_path / "teacher")
    _write(tmp_path / "teacher", value=1.0)
    (fault,) = pin_faults(began, own, field=TEACHER)
    assert "holds weights with fingerprint" in fault.fact
    (fault,) = origin_faults("corpus", how, str(tmp_path / "teacher"))
    assert fault.remedy.startswith(f"set {TEACHER}={began}, or store this one's")
    # a copy of the first one, no teacher, one that is gone, and logits of an older release
    for uri in (str(tmp_path / "copy"), "none", str(tmp_path / "gone")):
        assert [*origin_faults("corpus", how, uri)] == []
    assert [*origin_faults("corpus", {"checkpoint": began}, str(tmp_path / "teacher"))] == []


def test_logits_of_a_teacher_that_is_trained_further_are_still_those_of_its_run(
    tmp_path: Path,
) -> None:
    began, run = _write(tmp_path / "teacher"), tmp_path / "teacher"
    how = {"checkpoint": began, FINGERPRINT: fingerprint_at(began)}
    later = open_checkpoint(_write(tmp_path / "later", value=1.0)).manifest
    # the run's newest checkpoint from now on
    commit(open_store(str(run)), replace(later, step=9))
    assert fingerprint_at(str(run)) != how[FINGERPRINT]
    for uri in (str(run), f"{run}/", began, began.rpartition("/")[0]):
        assert [*origin_faults("corpus", how, uri)] == []
    # its newest checkpoint by name is another teacher
    (fault,) = origin_faults("corpus", how, f"{run}/checkpoints/step-00000009")
    assert fault.remedy.startswith(f"set {TEACHER}={began}")


def test_fingerprint_is_that_of_the_weights_wherever_their_boxes_are_listed(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    _write(tmp_path / "listed")
    listed = open_checkpoint(str(tmp_path / "listed"))
    monkeypatch.setattr("raymega.checkpoint.format.manifest.INLINE_BOXES", 4)
    copy_checkpoint(*listed, open_store(str(tmp_path / "indexed")))
    assert open_root(str(tmp_path / "indexed")).manifest.index is not None
    found = fingerprint_at(str(tmp_path / "listed"))
    assert fingerprint_at(str(tmp_path / "indexed")) == found
    # in any order, and with the moments of the run that made them
    boxes = tuple(listed.manifest.boxes)
    moment = replace(boxes[0], tensor=f"adam.exp_avg/{boxes[0].tensor.partition('/')[2]}")
    others = replace(listed.manifest, boxes=(moment, *reversed(boxes)))
    assert fingerprint_of(others) == found
    _write(tmp_path / "other", value=1.0)
    assert fingerprint_at(str(tmp_path / "other")) != found


def test_a_job_is_told_that_its_stored_logits_are_of_another_teacher(tmp_path: Path) -> None:
    _write(tmp_path / "teacher")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    how = {"checkpoint": "runs/other", FINGERPRINT: "0"}
    logit_files(str(corpus)).how.write_text(json.dumps(how))
    options = (
        *DISTILLED,
        "distillation.teacher=stored",
        f"{TEACHER}={tmp_path}/teacher",
        f"data.path={corpus}",
    )
    with pytest.raises(ConfigError, match=r"the logits beside .*corpus are of runs/other"):
        load_job(VERIFY, options, is_for_training=True)
