"""The worker group on a real local Ray, called as the controller calls it."""

import os
import signal
import time

import pytest
import ray
from ray._private import state
from ray.util.placement_group import placement_group, remove_placement_group

from raymega.errors import CapacityError
from raymega.events import StepFinished
from raymega.messages import Entered, Requests, WorkerDied, WorkerFailed, WorkerFinished
from raymega.orchestrate.core.worker_group_api import AttemptSpec, Heartbeat
from raymega.orchestrate.workers import actor_calls, placement_slots, ray_worker_group
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from tests.support.jobs import make_test_plan
from tests.support.local_ray import leftovers

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

SMALL = ("parallel.tp=2", "checkpoint.every=1000", "optimizer.lr_warmup_steps=0")
ENTRY = "tests.support.entries"


@pytest.fixture
def make_group(tmp_path):
    """A group, its slots reserved, and its first attempt begun."""
    groups = []

    def make(name="calm", *overrides, reserve=True):
        plan = make_test_plan(*SMALL, f"run.name={name}", *overrides)
        group = RayWorkerGroup(plan, log_dir=tmp_path, can_grow=False, entry=ENTRY)
        groups.append(group)
        if reserve:
            assert group.reserve(200.0) is None
            group.start(order(plan, tmp_path, attempt=1))
        group.plan = plan
        return group

    yield make
    for group in groups:
        group.release(keep_warm=False)
    assert leftovers() == []


def order(plan, tmp_path, *, attempt):
    return AttemptSpec(
        plan_json=plan.to_json(), run_uri=str(tmp_path / "run"), attempt=attempt, restore=""
    )


def poll_until(group, is_last, timeout_s=200.0):
    """Reports up to the first one for which ``is_last`` holds."""
    deadline_s, seen = time.monotonic() + timeout_s, []
    while time.monotonic() < deadline_s:
        for report in group.poll(0.5):
            seen.append(report)
            if is_last(report):
                return seen
    raise AssertionError(f"not in {timeout_s} s; last came {seen[-5:]}")


def wait_for_start(group):
    return poll_until(group, lambda r: isinstance(r, Entered) and r.phase == "restored")


def pids(group):
    return {rank: place.pid for rank, place in group.members().items()}


def test_workers_run_to_the_end_and_leave_nothing(make_group, tmp_path):
    group = make_group("calm", "run.steps=3")
    assert len(leftovers(patience_s=0)) == 6, "four actors and two placement groups"
    finished, deadline_s = [], time.monotonic() + 200
    while len(finished) < 4 and time.monotonic() < deadline_s:
        finished += [r.rank for r in group.poll(0.5) if isinstance(r, WorkerFinished)]
    assert sorted(finished) == [0, 1, 2, 3]
    assert len(set(pids(group).values())) == 4
    living = [actor for actor in state.actors().values() if actor["State"] == "ALIVE"]
    names = {actor["Name"]: actor["Pid"] for actor in living}
    assert names["calm/a1/rank3-tp1-pp1-dp0"] == pids(group)[3]
    assert "training prints 2" in (tmp_path / "rank-00002.log").read_text()
    group.release(keep_warm=False)
    assert leftovers() == []


@pytest.mark.wide
def test_death_of_a_process_is_reported_as_one(make_group):
    group = make_group("calm", "run.steps=100000")
    wait_for_start(group)
    pid = pids(group)[2]
    os.kill(pid, signal.SIGKILL)
    died = poll_until(group, lambda r: isinstance(r, WorkerDied))[-1]
    assert died.rank == 2 and f"process {pid}" in died.cause


def test_monitor_of_a_node_tells_of_its_ranks_over_attempts_and_may_be_lost(
    make_group, tmp_path, monkeypatch
):
    """As large runs are watched, on four ranks: deaths and steps come from the node's monitor."""
    monkeypatch.setattr(ray_worker_group, "WATCH_DIRECTLY", 0)
    group = make_group("calm", "run.steps=100000")
    monkeypatch.setattr(ray_worker_group, "LOOK_EVERY_S", 1000.0)  # no look at the ranks' own calls
    wait_for_start(group)
    (monitor,) = group._monitors._by_node.values()
    assert sorted(monitor.heard) == [0, 1, 2, 3]
    heard = poll_until(group, lambda report: isinstance(report, StepFinished))
    assert any(isinstance(report, Heartbeat) and report.every_s == 2.0 for report in heard)
    # a killed process
    os.kill(pids(group)[2], signal.SIGKILL)
    assert poll_until(group, lambda r: isinstance(r, WorkerDied))[-1].rank == 2
    # the next attempt, by the same monitor
    group.release(keep_warm=True)
    monkeypatch.setattr(ray_worker_group, "LOOK_EVERY_S", 1.0)
    assert group.reserve(200.0) is None
    group.start(order(group.plan, tmp_path, attempt=2))
    wait_for_start(group)
    assert [*group._monitors._by_node.values()] == [monitor]
    # without the monitor the driver hears the ranks itself
    ray.kill(monitor.actor)
    poll_until(group, lambda report: isinstance(report, Heartbeat) and report.every_s == 1.0)
    assert not group._monitors._by_node
    poll_until(group, lambda report: isinstance(report, StepFinished))


def test_release_keeps_survivors_warm_and_the_next_attempt_uses_them(
    make_group, tmp_path, monkeypatch
):
    monkeypatch.setattr(actor_calls, "ABORT_PATIENCE_S", 100.0)
    group = make_group("calm", "run.steps=100000")
    wait_for_start(group)
    before = pids(group)
    os.kill(before[1], signal.SIGKILL)
    poll_until(group, lambda r: isinstance(r, WorkerDied))
    assert group.is_loading()  # the slot of the lost one, on a node that lives
    group.release(keep_warm=True)
    assert group.members() == {}
    assert group.reserve(200.0) is None
    group.start(order(group.plan, tmp_path, attempt=2))
    wait_for_start(group)
    after = pids(group)
    assert {rank for rank in after if after[rank] == before[rank]} == {0, 2, 3}
    poll_until(group, lambda _report: not group.is_loading())


@pytest.mark.wide
def test_worker_that_does_not_let_go_is_replaced(make_group, tmp_path):
    group = make_group("x.hang-3-2", "run.steps=100000")
    wait_for_start(group)
    before, deadline_s = pids(group), time.monotonic() + 200
    while "it hangs" not in (tmp_path / "rank-00003.log").read_text():
        assert group.poll(0.1) is not None and time.monotonic() < deadline_s
    group.release(keep_warm=True)
    assert group.reserve(200.0) is None
    group.start(order(group.plan, tmp_path, attempt=2))
    wait_for_start(group)
    # a slow one of the others may be replaced too: that they are kept is shown above, with more patience
    after = pids(group)
    assert after.keys() == before.keys() and after[3] != before[3]


@pytest.mark.wide
def test_exception_arrives_once_with_rank_and_cause(make_group):
    group = make_group("x.raise-1-3")
    failed = poll_until(group, lambda r: isinstance(r, WorkerFailed) and not r.is_secondary)[-1]
    assert (failed.rank, failed.step, failed.error) == (1, 2, "ValueError")
    assert "a passing error" in failed.traceback


@pytest.mark.wide
def test_requests_reach_every_rank(make_group):
    group = make_group("calm", "run.steps=100000")
    wait_for_start(group)
    group.request(Requests(stop=True, save=True))
    assert poll_until(group, lambda r: isinstance(r, WorkerFinished))[-1].stopped


def test_failing_entry_is_reported_and_not_raised(make_group, tmp_path):
    group = make_group("calm", reserve=False)
    group._entry = "tests.support.no_such_entry"
    assert group.reserve(200.0) is None
    group.start(order(group.plan, tmp_path, attempt=1))
    failed = poll_until(group, lambda r: isinstance(r, WorkerFailed))[-1]
    assert failed.error == "ModuleNotFoundError"


def test_reserve_refuses_what_can_never_fit(make_group):
    group = make_group("calm", "cluster.cpus_per_worker=1.5", reserve=False)
    with pytest.raises(CapacityError, match="there is room for 2"):
        group.reserve(1.0)
    assert leftovers() == []


def test_reserve_waits_while_another_job_has_the_slots(make_group):
    other = placement_group([{"CPU": 3.9}])
    ray.get(other.ready(), timeout=200)
    group = make_group("calm", reserve=False)
    lacking = group.reserve(0.2)
    assert "0.1 CPU free" in lacking.fact and "4 workers of 0.1 CPU each" in lacking.rule
    remove_placement_group(other)
    assert group.reserve(200.0) is None


def test_half_of_the_slots_is_given_back_to_who_waits_for_it(make_group, monkeypatch):
    """Else two runs that hold half of their slots each would wait for each other."""
    monkeypatch.setattr(placement_slots, "HALF_S", 100_000.0)
    first = placement_group([{"CPU": 2.0}])
    ray.get(first.ready(), timeout=200)
    group = make_group("calm", "cluster.cpus_per_worker=1.0", reserve=False)
    assert group.reserve(1.0) is not None, "it holds one tp pair of two"
    second = placement_group([{"CPU": 2.0}])
    assert group.reserve(0.2) is not None and not second.wait(0), "and keeps it for a while"
    monkeypatch.setattr(placement_slots, "HALF_S", 2.0)
    group._slots._patient_until_s = 0.0
    deadline_s = time.monotonic() + 200
    while not second.wait(0):
        assert group.reserve(0.2) is not None and time.monotonic() < deadline_s
    for other in (first, second):
        remove_placement_group(other)
    while group.reserve(0.2) is not None:
        assert time.monotonic() < deadline_s
