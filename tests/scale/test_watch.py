"""Watching thousands of ranks: what a tick of the real controller costs when every rank is heard of."""

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from raymega.messages import Progress, WorkerDied
from raymega.orchestrate.core.worker_group_api import Heartbeat
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.rank_reports import ratios
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.workers.node_monitor import NodeReport
from tests.scale.curves import cpu_s, exponent
from tests.scale.fake_ray import FakeCluster, fake_ray
from tests.scale.test_start import (
    LARGE,
    group_of,
    plan_of,
    poll_until_started,
    reserve,
    spec_of,
)
from tests.support.fakes import FakeClock, FakeWorkerGroup, FakeWorkers, InlineExecutor, MemorySink
from tests.support.leases import take_lease
from tests.support.memory_store import MemoryStore

TICKS = 20


def running(world_size):
    """A controller in RUNNING, and its group."""
    plan, clock, store = plan_of(world_size, "run.steps=1000"), FakeClock(), MemoryStore()
    workers = FakeWorkers(world_size)
    group = FakeWorkerGroup(clock, store, world_size=world_size, script=[workers.enter()])
    context = RunContext(
        plan, lease=take_lease(store, clock), group=group, sink=MemorySink(), clock=clock,
        executor=InlineExecutor(),
    )  # fmt: skip
    context.open()
    controller = Controller(context)
    for _ in range(4):
        controller.tick()
    assert controller.state.state.name == "RUNNING"
    return controller, group


def started(world_size, tmp_path, monkeypatch):
    """A fake cluster, and the real group of workers that has started on it."""
    cluster, plan = FakeCluster(batch=world_size), plan_of(world_size)
    fake_ray(monkeypatch, cluster)
    group = group_of(plan, tmp_path)
    reserve(group, plan)
    group.start(spec_of(plan))
    poll_until_started(group, cluster, world_size)
    return cluster, group


def ticks(world_size):
    """A function that makes TICKS ticks in which every rank answers and has made a step."""
    controller, group = running(world_size)
    for step in range(1, TICKS + 1):
        signs = [
            sign
            for rank in range(world_size)
            for sign in (Heartbeat(rank=rank), Progress(rank=rank, step=step))
        ]
        group._polls.append(signs)
    return lambda: [controller.tick() for _ in range(TICKS)]


def test_cpu_time_of_a_tick_in_which_every_rank_is_heard_of_is_linear():
    costs = {n: cpu_s(lambda n=n: ticks(n)) / TICKS for n in (512, 4096)}
    print(costs)
    assert exponent(costs) < 1.5


@pytest.mark.wide
def test_cpu_time_of_a_tick_at_16384_ranks():
    for n, most_s in ((512, 0.002), (4096, 0.010), (LARGE, 0.040)):
        spent_s = cpu_s(lambda n=n: ticks(n)) / TICKS
        print(n, spent_s)
        assert spent_s < most_s


def test_cpu_time_of_the_ratios_of_stragglers_is_linear():
    """A definition that sorts all others for each rank takes a minute at 4,096."""
    costs = {}
    for n in (2048, LARGE):
        grid, work_s = plan_of(n).grid, {rank: 1.0 + rank % 7 for rank in range(n)}
        costs[n] = cpu_s(lambda grid=grid, work_s=work_s: lambda: dict(ratios(work_s, grid)))
    assert exponent(costs) < 1.5


@pytest.mark.parametrize(
    ("world_size", "per_s"),
    [(64, 64), (512, 64), (4096, 512), pytest.param(LARGE, 512, marks=pytest.mark.wide)],
)
def test_driver_gets_few_answers_a_second_and_waits_for_few_calls(
    world_size, per_s, tmp_path, monkeypatch
):
    """Each rank up to 64; of more, each node, at an interval that grows with their number."""
    cluster, group = started(world_size, tmp_path, monkeypatch)
    for _ in range(20 * LARGE // world_size):
        group.poll(0.0)
    # one call for more reports is pending for each that answers
    pending = group._calls.refs(with_holds=False)
    every_s = group._monitors.every_s if world_size > 64 else 1.0
    assert len(pending) / every_s == per_s
    # all are heard of when the answers come, and a tick looks at no rank's own call
    cluster.waited = 0
    cluster.ready = dict.fromkeys(pending, "next_reports")
    group._held_s = float("inf")
    heard = {sign.rank for sign in group.poll(0.0) if isinstance(sign, Heartbeat)}
    assert len(heard) == world_size
    most = 2 * len(pending) if world_size > 64 else 4 * world_size
    assert cluster.waited <= most


def test_death_that_a_monitor_tells_is_reported_once_and_a_lost_monitor_costs_nothing(
    tmp_path, monkeypatch
):
    cluster, group = started(512, tmp_path, monkeypatch)
    while cluster.ready:
        group.poll(0.0)
    monitors = [*group._monitors._by_node.values()]
    assert sorted(rank for monitor in monitors for rank in monitor.heard) == [*range(512)]
    # a death by the monitor, and then by the process's own call
    told = NodeReport(heard=(), reports=(), deaths={min(monitors[3].heard): "killed"})
    first = group._on_node_reports(monitors[3], told)
    again = group._on_node_reports(monitors[3], told)
    deaths = [report for report in first + again if isinstance(report, WorkerDied)]
    assert [(each.rank, "killed" in each.cause) for each in deaths] == [
        (min(monitors[3].heard), True)
    ]
    # a monitor's own end: the driver asks its ranks
    before = cluster.counts["next_reports"]
    assert group._on_death(monitors[5], RayActorError()) == []
    assert cluster.counts["next_reports"] == before + 8
    # at the end no monitor hears a rank
    group.release(keep_warm=True)
    assert cluster.counts["stop"] == 63
    group.release(keep_warm=False)
    assert not group._monitors._by_node


def test_worker_that_ray_ends_for_its_nodes_memory_is_a_death_and_its_process_is_ended(
    tmp_path, monkeypatch
):
    cluster, group = started(64, tmp_path, monkeypatch)
    while cluster.ready:
        group.poll(0.0)
    actor = group._slots.slots[3].actor
    (ref,) = [ref for ref, call in group._calls._holds.items() if call.slot.rank == 3]
    ref.answer = OutOfMemoryError("the node is low on memory")
    cluster.ready[ref] = "hold"
    (death,) = [report for report in group.poll(0.0) if isinstance(report, WorkerDied)]
    assert death.rank == 3 and "low on memory" in death.cause
    # Ray may have lost only the way to it: its slot is free for the next one
    assert actor.is_dead and cluster.counts["kill"] == 1 and group._slots.slots[3].actor is None
