"""A layout that fails shrinks to the smallest one that does, with few questions."""

import pytest

from raymega.verify.layout import Layout
from raymega.verify.minimise import minimise, simpler_layouts
from tests.unit.verify.jobs import make_job

JOB = make_job()
LARGE = Layout(
    tp=2, pp=2, dp=2, schedule="1f1b", micro_batch_size=3, order="pp-dp-ep-cp-tp"
)  # fmt: skip


@pytest.mark.parametrize(
    ("is_failing", "smallest"),
    [
        (lambda x: x.tp > 1, Layout(tp=2, micro_batch_size=16)),
        (lambda x: x.dp > 1, Layout(dp=2, micro_batch_size=8)),
        (lambda x: x.pp > 1 and x.schedule == "1f1b", Layout(pp=2, schedule="1f1b", micro_batch_size=16)),
        (lambda x: x.micro_batch_size < 16, Layout(micro_batch_size=3)),
        (lambda x: x.tp > 1 and x.order[:2] == "pp", Layout(tp=2, order=LARGE.order, micro_batch_size=16)),
        (lambda x: x == LARGE, LARGE),
    ],
    ids=["tp", "dp", "1f1b", "accumulation", "order", "nothing-less"],
)  # fmt: skip
def test_smallest_failing_layout_is_found(is_failing, smallest):
    asked = []

    def ask(layout):
        asked.append(layout)
        return is_failing(layout)

    assert minimise(JOB, LARGE, ask) == smallest
    assert len(asked) == len(set(asked)) <= 20


def test_degree_falls_to_the_smallest_that_fails():
    start = Layout(tp=2, dp=4)
    assert minimise(JOB, start, lambda x: x.dp > 2) == Layout(dp=3, micro_batch_size=6)


def test_simpler_layouts_are_legal_and_differ():
    found = list(simpler_layouts(JOB, LARGE))
    assert LARGE not in found and len(set(found)) == len(found)
