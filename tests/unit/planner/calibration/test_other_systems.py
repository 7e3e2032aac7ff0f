"""How other systems than raymega go through a step: facts of Software, against schedules played so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from raymega.plan.memory.activation_shape import activation_shape
from raymega.planner.cost.simulated_step import PlannedTimes
from raymega.planner.cost.step_time import stage_times, step_time
from raymega.planner.kernels.collective_time import message_s as message_of
from raymega.planner.kernels.system_traits import RAYMEGA
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.simulate import simulate
from raymega.schedule.table import make_schedule
from tests.unit.planner.cost.test_simulated_step import H100, MOST_OFF, piped


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb_h1", 1)])
def test_a_system_that_hides_no_message_stands_still_for_each(name, chunks):
    """As if each pass took longer by its message; a gradient's goes behind a weights' part that is apart."""
    sizes = {"schedule.chunks": chunks, "schedule.name": name, "data.global_batch_size": 32}
    plan, still = piped(**{"parallel.pp": 4, **sizes}), replace(RAYMEGA, hides_messages=False)
    slow = replace(H100, link_bytes_per_s=H100.link_bytes_per_s / 50)
    shape = activation_shape(plan.job)
    num_bytes = shape.tokens * shape.model.hidden_size * shape.element
    message_s = message_of(slow, num_bytes, is_inside=True)

    @dataclass(frozen=True)
    class Standing(PlannedTimes):
        def of_task(self, rank: int, task: Instruction) -> float:
            sends = task.op in (Op.FORWARD, Op.BACKWARD)
            return super().of_task(rank, task) + sends * message_s

    stages = stage_times(plan, slow)
    by_rank = [
        [stages[plan.placement.stage(r, c)].durations for c in range(chunks)] for r in range(4)
    ]
    program = make_schedule(name, plan.sizes(plan.batch))
    taken = simulate(program, Standing(stages=by_rank, transfer=0.0)).time
    assert 64 * message_s * chunks > 2 * MOST_OFF * taken
    assert step_time(plan, slow, still).pipeline_s == pytest.approx(taken, rel=MOST_OFF)


def test_a_system_that_does_not_wait_for_the_update_begins_late_and_ends_late():
    waits, goes_on = RAYMEGA, replace(RAYMEGA, waits_for_update=False)
    for name, is_shorter in (("zb_h2", True), ("1f1b", False), ("zb_h1", False)):
        plan = piped(**{"parallel.pp": 4, "schedule.name": name, "data.global_batch_size": 64})
        times = [step_time(plan, H100, software).bubble_s for software in (waits, goes_on)]
        assert (times[1] < 0.2 * times[0]) == is_shorter
        assert is_shorter or times[0] == times[1]
