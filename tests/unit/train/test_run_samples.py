"""The row that holds a sample's prompt and what is drawn after it."""

import pytest

from raymega.plan.batch import row_length
from tests.support.jobs import make_test_plan

LONG = "model.max_positions=256"


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "length"),
    [
        (20, 256, 32),
        (32, 256, 32),
        (33, 256, 64),
        (300, 256, 256),
        # a row that the unit does not divide is as long as the run's
        (20, 100, 100),
    ],
)
def test_row_is_the_shortest_that_holds_the_tokens_in_whole_units(num_tokens, seq_len, length):
    assert row_length(num_tokens, make_test_plan(f"data.seq_len={seq_len}", LONG).job) == length


def test_unit_grows_with_the_axes_that_cut_a_row():
    plan = make_test_plan(
        "data.seq_len=256", LONG, "parallel.tp=2", "parallel.pp=1", "parallel.cp=2"
    )
    assert row_length(20, plan.job) == 128
