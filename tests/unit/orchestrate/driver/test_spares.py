"""A run says when no spare is loaded, and when all are."""

from raymega.events import SparesChanged, StepFinished
from raymega.orchestrate.driver.spares import SpareWatch
from raymega.tracking.console import ConsoleSink
from tests.support.fakes import FakeWorkers
from tests.unit.orchestrate.driver.test_controller import World
from tests.unit.orchestrate.driver.test_resize import processes


def told(wanted, *counts):
    watch = SpareWatch(wanted)
    found = [watch.observe(ready, step=step) for step, ready in enumerate(counts, 1)]
    return [(each.step, each.ready) for each in found if each]


def test_each_change_is_told_once():
    assert told(2, 0, 0, 1, 2, 2, 1, 2, 0, 0) == [(1, 0), (4, 2), (8, 0)]
    assert told(1, 3, 3) == [(1, 1)], "more than wanted are all"


def test_run_that_wants_none_is_silent():
    assert told(0, 0, 1, 0) == []


def test_driver_tells_while_a_spare_loads_and_when_it_has():
    world, workers = World(), FakeWorkers(4)
    world.drive(workers.enter() + workers.steps(2), overrides=["parallel.pp=2", "elastic.spares=2"])
    world.group.locations = processes(4)
    while not world.sink.of(StepFinished):
        world.controller.tick()
    world.group.locations = processes(6)
    while len(world.sink.of(StepFinished)) < 2:
        world.controller.tick()
    assert [(each.step, each.ready, each.attempt) for each in world.sink.of(SparesChanged)] == [
        (1, 0, 1), (2, 2, 1),
    ]  # fmt: skip


def test_console_says_what_it_means(capsys):
    import sys

    console = ConsoleSink(sys.stdout, every=10)
    for ready in (0, 2):
        console.emit(SparesChanged(attempt=1, step=7, ready=ready, wanted=2))
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first
        == "No spare is loaded after step 7, of 2: a worker lost now is replaced by a new process."
    )
    assert second == "2 of 2 spares are loaded after step 7."
