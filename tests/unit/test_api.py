"""The plain functions behind the commands, as far as no cluster is needed."""

from pathlib import Path

import pytest

from raymega.api import load_job, local_folder
from raymega.errors import ConfigError

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
