"""Keys and the order of age."""

from itertools import pairwise

import pytest

from raymega.checkpoint.format.keys import (
    CheckpointId,
    checkpoint_of,
    data_file,
    folder_of,
    is_manifest,
    manifest_key,
)


def test_keys_carry_step_attempt_and_rank():
    assert folder_of(100) + data_file(attempt=2, rank=3) == (
        "checkpoints/step-00000100/a0002-rank00003.safetensors"
    )
    assert manifest_key(CheckpointId(attempt=2, step=100)) == (
        "checkpoints/step-00000100/manifest-a0002.json"
    )


@pytest.mark.parametrize("step", [0, 100, 123456789])
@pytest.mark.parametrize("attempt", [1, 12345])
def test_key_tells_its_checkpoint(step, attempt):
    at = CheckpointId(attempt=attempt, step=step)
    data = folder_of(step) + data_file(attempt=attempt, rank=123456)
    assert checkpoint_of(manifest_key(at)) == checkpoint_of(data) == at
    assert is_manifest(manifest_key(at)) and not is_manifest(data)


@pytest.mark.parametrize(
    "key",
    [
        "run.json",
        "checkpoints/notes.txt",
        "checkpoints/step-00000100/manifest-a0001.json.bak",
        "checkpoints/step-00000100/x/manifest-a0001.json",
        "other/checkpoints/step-00000100/manifest-a0001.json",
    ],
)
def test_foreign_key_is_part_of_no_checkpoint(key):
    assert checkpoint_of(key) is None and not is_manifest(key)


def test_later_attempt_is_newer_whatever_its_step():
    by_age = [CheckpointId(attempt=a, step=s) for a, s in ((1, 90), (1, 200), (2, 150), (2, 160))]
    assert all(older < newer for older, newer in pairwise(by_age))
