"""Two real drivers and one run: the second is refused, and a stopped one never comes back."""

import signal

import pytest

from raymega.checkpoint.format.epochs import newest_epoch
from raymega.checkpoint.format.keys import checkpoint_of, is_manifest
from raymega.checkpoint.format.manifest import find_restore, list_manifests
from raymega.orchestrate.run_store.journal import read_record
from raymega.storage.registry import open_store
from tests.ray.test_driver_process import read_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.wide]

LEASE_S = 15.0
JOB = ("run.steps=100000", "checkpoint.every=5", f"elastic.lease_s={LEASE_S}")


def attempts_of(keys):
    return [checkpoint_of(key).attempt for key in keys]


def test_second_driver_is_refused_and_one_that_was_stopped_never_comes_back(start_driver, tmp_path):
    store = open_store(str(tmp_path / "run"))
    first = start_driver()
    read_until(first, "step", at_least=8)

    refused = start_driver()
    words, _ = refused.communicate(timeout=500)
    assert refused.returncode == 6, words
    assert f"process {first.pid} on " in words and "epoch 1, was renewed at" in words
    assert newest_epoch(store) == 1, "it has left nothing"

    # Its workers train on, and what they have saved waits for its driver's commit.
    first.send_signal(signal.SIGSTOP)
    second = start_driver()
    (step,) = read_until(second, "step")
    read_until(second, "step", at_least=step + 12)
    before = list_manifests(store)
    assert 2 in attempts_of(before)

    first.send_signal(signal.SIGCONT)
    words, _ = first.communicate(timeout=500)
    assert first.returncode == 6, words
    assert f"was taken by another driver (process {second.pid} on " in words.splitlines()[-1]
    read_until(second, "step", at_least=step + 24)
    assert set(attempts_of(list_manifests(store))) == {2}, "the second driver has pruned on"
    assert find_restore(store).manifest.attempt == 2
    assert read_record(store).num_attempts == 2

    # Whatever a driver writes that nobody could stop: readers pass over it.
    newest = list_manifests(store)[0]
    late = newest.replace(newest.split("/")[1], "step-99999999").replace("a0002", "a0001")
    store.put(late, [store.get(newest)], overwrite=False)
    assert is_manifest(late) and late not in list_manifests(store)
