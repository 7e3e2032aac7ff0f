"""What happens to a run when its driver is killed, and when Ctrl-C is pressed at its terminal."""

import os
import signal
import time
from pathlib import Path

import pytest

from raymega.orchestrate.run_store.journal import read_record
from raymega.storage.registry import open_store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

JOB = ("run.steps=100000", "checkpoint.every=5")


def read_until(driver, word, at_least=0):
    """The numbers of the first line that begins with ``word``, the first of them large enough."""
    for line in driver.stdout:
        first, *rest = line.split()
        if first == word and int(rest[0]) >= at_least:
            return [int(number) for number in rest]
    raise AssertionError(f"the driver ended with code {driver.wait(60)}, without {word}")


def wait_until_gone(pids, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s, f"{pids} live on"
        time.sleep(0.05)


def wait_until_recorded(store, status, timeout_s):
    """Wait for the journal's thread, which writes beside the driver's loop: steps may be told before it has."""
    deadline_s = time.monotonic() + timeout_s
    while read_record(store).status != status:
        assert time.monotonic() < deadline_s, f"the run is {read_record(store).status}"
        time.sleep(0.05)


def test_killed_driver_is_continued_and_ctrl_c_saves(start_driver, tmp_path):
    store = open_store(str(tmp_path / "run"))

    first = start_driver()
    pids = read_until(first, "pids")
    read_until(first, "step", at_least=8)
    wait_until_recorded(store, "running", timeout_s=200)
    first.send_signal(signal.SIGKILL)
    wait_until_gone(pids, timeout_s=200)
    record = read_record(store)
    assert record.status == "running"

    second = start_driver()
    (step,) = read_until(second, "step")
    assert step % 5 == 1 and step >= 6, "it goes on behind a checkpoint"
    os.killpg(second.pid, signal.SIGINT)
    assert second.wait(200) == 75
    after = read_record(store)
    assert (after.run_id, after.status, after.num_attempts) == (record.run_id, "preempted", 2)
    assert after.step >= step


@pytest.mark.wide
def test_sigterm_to_the_whole_process_group_saves_before_ray_ends(start_driver, tmp_path):
    driver = start_driver()
    pids = read_until(driver, "pids")
    read_until(driver, "step", at_least=8)
    os.killpg(driver.pid, signal.SIGTERM)
    assert driver.wait(200) == 75
    record = read_record(open_store(str(tmp_path / "run")))
    assert record.status == "preempted"
    assert record.step >= 8, "the step at which it was stopped, and not the checkpoint before"
    wait_until_gone(pids, timeout_s=200)
