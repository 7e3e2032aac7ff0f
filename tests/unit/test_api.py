"""The plain functions behind the commands, as far as no cluster is needed."""

import re
from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.errors import ConfigError
from raymega.launch import local_folder
from raymega.optim.lr_schedule import learning_rate

JOB = Path(__file__).parents[2] / "jobs" / "verify.yaml"


def folder_of(uri):
    return local_folder(load_job(JOB, (f"checkpoint.uri={uri}",), is_for_training=False))


def test_local_run_keeps_logs_and_pictures_beside_its_checkpoints(tmp_path):
    assert folder_of(tmp_path) == tmp_path / "verify"


def test_runs_of_one_name_in_two_buckets_keep_their_logs_apart():
    home = Path.home() / ".raymega" / "remote" / "s3"
    assert folder_of("s3://one/team/runs") == home / "one" / "team" / "runs" / "verify"
    assert folder_of("s3://two/runs/") == home / "two" / "runs" / "verify"


def test_no_uri_leads_out_of_the_folder_for_remote_runs():
    home = Path.home() / ".raymega" / "remote"
    assert folder_of("s3://bucket/../../..") == home / "s3" / "bucket" / "verify"


def test_near_tier_in_the_run_s_own_store_is_refused(tmp_path):
    same = (f"checkpoint.uri={tmp_path}", f"checkpoint.local_uri=file://{tmp_path}/")
    with pytest.raises(ConfigError, match=r"is the folder of checkpoint\.uri too"):
        load_job(JOB, same, is_for_training=True)


@pytest.mark.parametrize(
    "overrides, steps",
    [
        (["run.steps=0", "run.tokens=10000"], 20),  # 16 sequences of 32 tokens a step: 19.5
        (["run.steps=0", "run.tokens=10240"], 20),
        (["run.steps=0", "run.tokens=10241"], 21),
        (["run.tokens=10240", "run.steps=20"], 20),
        (["run.steps=0", "run.epochs=0.5"], 2048),  # half of 65,536 sequences
        (
            [
                "run.steps=0",
                "run.tokens=10240",
                "data.batch_ramp=[{until_samples: 64, global_batch_size: 8}]",
            ],
            24,
        ),
    ],
)
def test_length_in_tokens_or_epochs_is_one_in_steps(overrides, steps):
    job = load_job(JOB, overrides)
    assert job.run.steps == steps
    # schedules end with the run
    assert learning_rate(job.optimizer, total_steps=job.run.steps, step=steps - 1) == pytest.approx(
        job.optimizer.lr * job.optimizer.min_lr_ratio
    )


@pytest.mark.parametrize(
    "overrides, fact",
    [
        (["run.steps=0"], "run.steps=0, run.tokens=0 and run.epochs=0"),
        (["run.tokens=10240"], "run.steps=20 with run.tokens=10240"),
        (["run.steps=0", "run.tokens=5", "run.epochs=1"], "run.tokens=5 with run.epochs=1"),
        (["run.steps=0", "run.epochs=2", "data.path=/nowhere"], "run.epochs=2 and data.path="),
        (
            ["run.steps=0", "run.epochs=2", "data.path=none", "data.sources=[{path: synthetic}]"],
            "run.epochs=2 with a blend",
        ),
    ],
)
def test_run_has_one_length(overrides, fact):
    more = [] if "run.steps=0" in overrides else ["run.steps=30"]
    fact = fact.replace("run.steps=20", "run.steps=30")
    with pytest.raises(ConfigError, match=re.escape(fact)):
        load_job(JOB, [*overrides, *more])
