"""What a rank holds at a schedule's peak, where a backward in two parts frees its memory in two."""

import pytest

from raymega.plan.memory.activation_bytes import StageActivations, peak_bytes
from raymega.planner.cost.peak_memory import memory_use
from raymega.schedule.schedules.zero_bubble_auto import peak, zb_auto
from tests.support.jobs import make_test_plan

AUTO = ("parallel.pp=2", "schedule.name=zb_auto", "data.global_batch_size=8", "schedule.chunks=1")
LETTERS = {"forward": "F", "backward_input": "B", "backward_weight": "W"}


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_owed_part_counts_by_its_share(share):
    plan = make_test_plan(*AUTO, f"schedule.wgrad_activation_fraction={share}")
    kept = StageActivations(micro_batch_bytes=1000, rerun_bytes=7)
    for work in zb_auto(plan.sizes(plan.batch)):
        word = "".join(LETTERS[task.op.name.lower()] for task in work)
        held = peak_bytes(work, [kept], wgrad_activation_fraction=share)
        assert held == round(1000 * peak(word, share)) + 7
        limit = 2
        assert held <= 1000 * limit + 7, "the search's limit is the plan's bytes"


def test_whole_backward_frees_all_at_once():
    (work, *_) = zb_auto(make_test_plan(*AUTO).sizes(make_test_plan(*AUTO).batch))
    kept = StageActivations(micro_batch_bytes=1000, rerun_bytes=0)
    assert peak_bytes(work, [kept], wgrad_activation_fraction=0.4) <= peak_bytes(work, [kept])


def test_auto_holds_what_it_may():
    narrow, wide = (
        memory_use(
            make_test_plan(*AUTO, f"schedule.max_in_flight_microbatches={limit}")
        ).activation_bytes
        for limit in (2, 4)
    )
    assert wide == 2 * narrow
