"""Starts of thousands of ranks in the real worker group: every answer costs the same, however many ranks there are."""

import math
import time

import pytest

from raymega.config.load import parse_job
from raymega.errors import CapacityError, Fault
from raymega.messages import SnapshotHolders
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.core.worker_group_api import AttemptSpec
from raymega.orchestrate.workers import rank_assignment, ray_worker_group
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.run_plan import make_plan
from tests.scale.curves import cpu_s, exponent
from tests.scale.fake_ray import GPUS_A_NODE, FakeActor, FakeCluster, fake_ray
from tests.support.jobs import VERIFY

SIZES = (64, 512, 4096)
LARGE = 16384
LINEAR = 1.1
"""Largest exponent of a linear cost: what is left is for caches."""


def plan_of(world_size, *more):
    """A plan of tp=8 and many replicas."""
    dp = world_size // 8
    sets = (
        "model.num_heads=8", "model.num_kv_heads=8", "parallel.tp=8", "parallel.pp=1", f"parallel.dp={dp}",
        f"cluster.num_workers={world_size}", f"data.global_batch_size={dp}", *more,
    )  # fmt: skip
    return make_plan(parse_job(VERIFY, sets).job())


def spec_of(plan, *, attempt=1, **more):
    return AttemptSpec(
        plan_json=plan.to_json(), run_uri="memory://runs/one", attempt=attempt, restore="", **more
    )


def group_of(plan, tmp_path, **more):
    return RayWorkerGroup(plan, log_dir=tmp_path, can_grow=True, **more)


def reserve(group, plan):
    group._ask_for_slots()
    assert group._slots.are_held and plan.grid.world_size == len(group._slots.slots)


def poll_until_started(group, cluster, world_size):
    for _ in range(20 * world_size):
        group.poll(0.0)
        if cluster.counts["start"] == world_size:
            return
    raise AssertionError(f"{cluster.counts}")


class Counted:
    """Function that counts its calls and the elements of its first argument."""

    def __init__(self, function):
        self.function, self.num, self.elements = function, 0, 0

    def __call__(self, first, *args, **more):
        self.num, self.elements = self.num + 1, self.elements + len(first)
        return self.function(first, *args, **more)


@pytest.fixture
def solved(monkeypatch):
    """The solutions of the whole assignment."""
    counted = Counted(rank_assignment.choose_ranks)
    monkeypatch.setattr(rank_assignment, "choose_ranks", counted)
    return counted


def start_all(world_size, tmp_path, monkeypatch, *, late_node=False):
    """A first start; with ``late_node`` the last node's processes answer after all others."""
    cluster, plan = FakeCluster(), plan_of(world_size)
    fake_ray(monkeypatch, cluster)
    group = group_of(plan, tmp_path)
    reserve(group, plan)
    group.start(spec_of(plan))

    def run():
        if late_node:
            late = [cluster.ready.popitem() for _ in range(2 * GPUS_A_NODE)]
            while cluster.ready:
                group.poll(0.0)
            cluster.ready = dict(late)
        poll_until_started(group, cluster, world_size)

    return run, cluster


@pytest.mark.parametrize("late_node", [False, True], ids=["together", "one-node-late"])
def test_ranks_are_assigned_once_and_every_worker_is_asked_four_times(
    late_node, tmp_path, monkeypatch, solved
):
    looks = []
    choose = rank_assignment.RankAssignment.choose
    monkeypatch.setattr(
        rank_assignment.RankAssignment, "choose", lambda its: looks.append(its) or choose(its)
    )
    for world_size in SIZES:
        looks.clear()
        run, cluster = start_all(world_size, tmp_path, monkeypatch, late_node=late_node)
        run()
        asked = [cluster.counts[each] for each in ("hold", "preload", "location", "start")]
        assert asked == [world_size] * 4
        assert cluster.counts["host_rendezvous"] == 1
        assert cluster.counts["table"] < 40
        # each look waits for all answers that it lacks
        assert len(looks) < 3 * math.log2(world_size)
    # the expected processes came where they were expected: nothing was to be solved
    assert solved.num <= 2 * len(SIZES)


def test_bytes_of_all_start_messages_are_linear(tmp_path, monkeypatch):
    num_bytes = {}
    for world_size in SIZES:
        run, cluster = start_all(world_size, tmp_path, monkeypatch)
        run()
        num_bytes[world_size] = cluster.num_bytes
    assert exponent(num_bytes) < LINEAR


def test_map_of_a_snapshot_travels_once_and_not_with_each_message(tmp_path, monkeypatch):
    num_bytes = {}
    for world_size in SIZES:
        cluster, plan = FakeCluster(), plan_of(world_size)
        fake_ray(monkeypatch, cluster)
        servers = SnapshotServers(plan, clock=SystemClock())
        servers._spawn = lambda node, cluster=cluster: kept(cluster, node)
        group = group_of(plan, tmp_path, snapshot_servers=servers)
        reserve(group, plan)
        holders = SnapshotHolders(
            servers=tuple(
                f"10.0.{node // 256}.{node % 256}:50051" for node in range(world_size // 8)
            ),
            by_rank=tuple(
                (rank // 8, (rank // 8 + 1) % (world_size // 8)) for rank in range(world_size)
            ),
        )
        group.start(spec_of(plan, holders=holders))
        poll_until_started(group, cluster, world_size)
        num_bytes[world_size] = cluster.num_bytes
    assert exponent(num_bytes) < LINEAR


def kept(cluster, node):
    from raymega.orchestrate.workers.snapshot_holders import _Kept

    actor = FakeActor(cluster, {"address": lambda: f"{node}:1"})
    return _Kept(actor=actor, end=actor.hold.remote(), answer=actor.address.remote())


def test_cpu_time_of_a_start_is_linear(tmp_path, monkeypatch):
    """Between 1,024 and 4,096 ranks: smaller starts are too short to time."""
    costs = {
        n: cpu_s(lambda n=n: start_all(n, tmp_path, monkeypatch, late_node=True)[0])
        for n in (1024, 4096)
    }
    print(costs)
    assert exponent(costs) < 1.6  # half way to a square


@pytest.mark.wide
def test_cpu_time_of_a_start_at_16384_ranks(tmp_path, monkeypatch):
    for n, most_s in ((512, 0.5), (4096, 3.0), (LARGE, 12.0)):
        spent_s = cpu_s(lambda n=n: start_all(n, tmp_path, monkeypatch, late_node=True)[0])
        print(n, spent_s)
        assert spent_s < most_s


@pytest.mark.parametrize("world_size", [64, 32], ids=["own-grid", "smaller-grid"])
def test_a_wait_for_room_takes_its_time_after_a_release(world_size, tmp_path, monkeypatch):
    # else the driver's loop spins until the pause is over, and on a smaller grid it did
    def without_room(cluster):
        raise CapacityError(lacking)

    lacking = Fault(fact="there is no node", rule="the grid needs one", remedy="add one")
    fake_ray(monkeypatch, FakeCluster())
    monkeypatch.setattr(ray_worker_group, "list_nodes", without_room)
    group = group_of(plan_of(64), tmp_path)
    group._slots._pause_until_s = math.inf
    if world_size < 64:
        group.use(plan_of(world_size))
    began_s = time.monotonic()
    assert group.reserve(0.1) is lacking
    assert time.monotonic() - began_s > 0.05
