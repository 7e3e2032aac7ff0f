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
from raymega.checkpoint.load.fingerprint import (
    FINGERPRINT,
    SOURCES,
    fingerprint_at,
    fingerprint_of,
    origin_faults,
    sources_of,
)
from raymega.checkpoint.load.pinned_source import TEACHER, pin_faults, pinned, teacher_faults
from raymega.checkpoint.tools.copy import copy_checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint, open_root
from raymega.convert.native import write_weights
from raymega.data.distillation.stored_logits import logit_files
from raymega.errors import ConfigError
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
) -> str:
    """Write ``value`` as all weights, of a run whose teacher is ``teacher``; return the manifest's URI."""
    job = make_test_plan(*DISTILLED, f"{TEACHER}={teacher}").job
    key = write_weights(
        open_store(str(uri)), saved_tensors(job.model), lambda tensor: np.full(tensor.shape, value, np.float32),
        dtype="float32", job=job.model_dump(mode="json") | {SOURCES: sources or {}}, created=created,
    )  # fmt: skip
    return f"{uri}/{key}"


def test_a_run_names_the_manifest_of_its_teacher(tmp_path: Path) -> None:
    began = _write(tmp_path / "teacher")
    options = (*DISTILLED, f"checkpoint.uri={tmp_path}/runs", f"{TEACHER}={tmp_path}/teacher")
    job = load_job(VERIFY, options, is_for_training=True)
    assert job.distillation.teacher_checkpoint == began
    # where the model has a teacher of no use, nothing is looked up
    off = load_job(VERIFY, [f"checkpoint.uri={tmp_path}/runs"], is_for_training=True)
    assert off.distillation.teacher_checkpoint == "none"


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
