"""What a job may not ask of its checkpoints, each refusal with its numbers."""

import pytest

from raymega.config.load import parse_job
from raymega.plan.validation.registry import job_faults
from tests.support.jobs import VERIFY


def _faults(*overrides):
    return [str(fault) for fault in job_faults(parse_job(VERIFY, overrides).values)]


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (("checkpoint.every=10", "run.eval_every=4"), "run.eval_every=4 does not divide"),
        (("checkpoint.every=10",), "run.eval_every=0 does not divide checkpoint.every=10"),
        (("checkpoint.every=0", "run.eval_every=4"), "checkpoint.every=0 leaves one"),
        (("checkpoint.every=8", "run.eval_every=4", "run.eval_samples=0"), "evaluates nothing"),
    ],
    ids=["not-a-divisor", "never", "one-save", "no-samples"],
)
def test_best_checkpoints_need_an_evaluation_of_every_step_that_is_saved(overrides, cause):
    (fault,) = _faults("checkpoint.keep_best=2", *overrides)
    assert "checkpoint.keep_best=2" in fault and cause in fault


def test_best_checkpoints_are_kept_where_each_has_a_loss():
    settings = ("checkpoint.keep_best=2", "checkpoint.every=8", "run.eval_every=4")
    assert _faults(*settings, "run.eval_samples=4") == []


def test_buffer_must_hold_a_row_of_the_widest_tensor():
    (fault,) = _faults("checkpoint.buffer_bytes=511")
    assert "checkpoint.buffer_bytes=511" in fault and "512 bytes for model.hidden_size=32" in fault
    assert _faults("checkpoint.buffer_bytes=512") == []
