"""WorkerSlots without Ray: who is ready, who hangs, who must leave, and that no two processes have one name."""

from types import SimpleNamespace

import pytest

from raymega.orchestrate.core.rank_placement import AssignedRank, WorkerLocation
from raymega.orchestrate.workers.placement_slots import WorkerSlot, WorkerSlots, name_of
from tests.support.jobs import make_test_plan

PLAN = make_test_plan("parallel.tp=2")
NOW_S = 1000.0


def slot(index, *, node="stays", is_warm=True, rank=-1, age_s=0.0, home=-1):
    return WorkerSlot(
        index=index, group=None, home=home, actor=object(), is_warm=is_warm,
        location=WorkerLocation(node_id=node, address="", pid=index),
        assigned=AssignedRank(rank=rank, local_rank=0) if rank >= 0 else None,
        ordered_s=NOW_S - age_s,
    )  # fmt: skip


class Drains:
    """As Departures: one node leaves."""

    def poll(self):
        return {"leaves": 50.0}

    def is_leaving(self, node_id):
        return node_id == "leaves"


@pytest.fixture
def slots():
    slots = WorkerSlots(PLAN.job.cluster, can_grow=True)
    slots._draining_nodes, slots.asked = Drains(), []
    slots._reserve = lambda number, block, *, is_spare: slots.asked.append(number)
    return slots


def test_ready_are_those_that_have_loaded_on_nodes_that_stay(slots):
    slots.slots = [slot(0), slot(1, is_warm=False), slot(2, node="leaves")]
    assert [each.index for each in slots.ready] == [0]


def test_ranks_on_a_node_that_leaves_are_named_and_their_slots_asked_for_once_in_whole_blocks(
    slots,
):
    slots.slots = [slot(0, rank=0), slot(1, rank=3, node="leaves"), slot(2, node="leaves")]
    found = [slots.drain(2) for _ in range(2)]
    assert found[0] == found[1] and (found[0].ranks, found[0].seconds) == ((3,), 50.0)
    assert slots.asked == [2]
    slots.slots = [slot(0, rank=0)]
    assert slots.drain(2) is None


def test_slots_of_a_later_request_get_spares_too(slots, monkeypatch):
    for name in ("kill", "remove_placement_group"):  # Ray does not run here
        monkeypatch.setattr(f"raymega.orchestrate.workers.placement_slots.{name}", id)
    for _ in range(2):
        slots.slots = [slot(0, rank=0, node="leaves")]
        slots.drain(1)
        slots.release()
    assert slots.asked == [1, 1]


def test_a_lost_slot_whose_substitute_was_asked_for_is_given_back_and_not_asked_for_again(
    slots, monkeypatch
):
    removed, asked = [], []
    module = "raymega.orchestrate.workers.placement_slots"
    monkeypatch.setattr(f"{module}.remove_placement_group", removed.append)
    monkeypatch.setattr(f"{module}.placement_group", lambda *_, **__: asked.append("new") or "new")
    left, stays, lost = slot(0, rank=0, node="leaves"), slot(1, rank=1), slot(2, rank=2)
    substitute = slot(3)
    left.group, stays.group, substitute.group = "left", "stays", "substitute"
    lost.group, substitute.is_spare = type("Group", (), {"bundle_specs": [{}]}), True
    slots.slots = [left, stays, lost]
    slots.drain(1)
    slots.slots.append(substitute)
    old = lost.group
    slots.ask_anew([left, lost])
    assert slots.slots == [stays, lost, substitute] and not substitute.is_spare
    assert (removed, asked, lost.group) == (["left", old], ["new"], "new")
    assert not slots._replaced


def test_stuck_is_who_has_not_loaded_in_the_time_of_a_start(slots, monkeypatch):
    now = SimpleNamespace(monotonic=lambda: NOW_S)
    monkeypatch.setattr("raymega.orchestrate.workers.placement_slots.time", now)
    slots.slots = [
        slot(0, age_s=100.0),
        slot(1, age_s=100.0, is_warm=False),
        slot(2, age_s=50.0, is_warm=False),
    ]
    assert [each.index for each in slots.stuck(100.0)] == [1]


def test_processes_that_are_ordered_between_attempts_have_names_of_their_own():
    names = {name_of(slot(index, home=0), PLAN, attempt=0) for index in (0, 1)}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("degrees", "name"),
    [
        (("parallel.tp=2", "parallel.pp=2"), "rank3-tp1-pp1-dp0"),
        (("parallel.cp=2", "parallel.dp=2"), "rank3-tp0-cp1-pp0-dp1"),
        (
            ("parallel.dp=4", "parallel.ep=2", "model.moe.num_experts=4", "model.moe.intermediate_size=16"),
            "rank3-tp0-ep1-pp0-dp3",
        ),
    ],
)  # fmt: skip
def test_name_of_a_process_has_its_coordinates(degrees, name):
    """Those of context and of experts only where the grid cuts them."""
    plan = make_test_plan(*degrees)
    assert name_of(slot(0, home=3), plan, attempt=2) == f"{plan.job.run.name}/a2/{name}"
