"""Which processes may bring the state that they hold into the next attempt."""

from collections import defaultdict

import pytest

from raymega.orchestrate.workers import placement_slots
from tests.scale.fake_ray import FakeCluster, fake_ray, worker
from tests.scale.test_start import group_of, plan_of, poll_until_started, reserve, spec_of

GO_ON, STEP = "elastic.on_replica_loss=continue", 30


class Run:
    """A run on 32 processes, then on 16 of them: the other half are spares with the state of attempt 1."""

    def __init__(self, tmp_path, monkeypatch):
        self.cluster, self.told = FakeCluster(), defaultdict(dict)  # by attempt, by process
        full, self.plan = plan_of(32, GO_ON), plan_of(16, GO_ON)
        fake_ray(monkeypatch, self.cluster)
        monkeypatch.setattr(
            placement_slots.WorkerSlots, "spawn", lambda _, slot, **more: self._spawn(slot)
        )
        self.group = group_of(full, tmp_path)
        reserve(self.group, full)
        self.train(1, plan=full)
        self.group.use(self.plan, {rank: rank for rank in range(16)})

    def _spawn(self, slot):
        slot.actor = worker(self.cluster, slot.index, slot.group.node)
        told = self.told

        def start(message, *_):
            told[message.attempt][slot.index] = message.is_held and message.is_holder

        slot.actor.answers |= {"start": start, "abort": lambda *_: STEP}

    def begin(self, attempt, *, plan=None, reported_step=-1):
        self.cluster.counts["start"] = 0
        spec = spec_of(plan or self.plan, attempt=attempt, reported_step=reported_step)
        self.group.start(spec)

    def train(self, attempt, *, plan=None, reported_step=-1):
        self.begin(attempt, plan=plan, reported_step=reported_step)
        poll_until_started(self.group, self.cluster, (plan or self.plan).grid.world_size)
        while self.cluster.ready:
            self.group.poll(0.0)
        self.group.release(keep_warm=True)

    def lose_a_node_of(self, attempt):
        """Its ranks go to spares."""
        slots = self.group._slots.slots
        node = slots[min(self.told[attempt])].location.node_id
        for slot in slots:
            if slot.location.node_id == node:
                slot.clear()
        self.group.use(self.plan, {rank: rank for rank in range(16)})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run after attempt 2, which 16 processes trained, and the loss of a node of it."""
    run = Run(tmp_path, monkeypatch)
    run.train(2)
    run.lose_a_node_of(2)
    return run


def test_spare_that_had_no_rank_is_no_holder_of_what_others_trained(run):
    run.train(3, reported_step=STEP)
    told = run.told[3]
    assert len(told) == 16
    assert {index for index, is_holder in told.items() if is_holder} == run.told[
        2
    ].keys() & told.keys()
    assert set(told.values()) == {True, False}


def test_spare_is_no_holder_after_an_attempt_that_never_told_it_to_start(run):
    run.cluster.held_back.add("host_rendezvous")
    run.begin(3, reported_step=STEP)
    assert len(run.group.members()) == 16
    run.group.release(keep_warm=True)
    assert sorted(run.group.held().values()) == [STEP] * 8
    run.cluster.held_back.remove("host_rendezvous")
    run.train(4, reported_step=STEP)
    assert sorted(run.told[4].values()) == [False] * 8 + [True] * 8
