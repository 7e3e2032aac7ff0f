"""Which jobs overlap messages over tp with products, and in how many blocks."""

import pytest

from raymega.api import load_job
from raymega.plan.hardware.tp_overlap import num_blocks, overlaps_messages
from raymega.plan.memory.activation_shape import activation_shape

CUT = ("parallel.tp=2", "parallel.sequence_parallel=true")


@pytest.mark.parametrize(
    ("overrides", "device", "is_overlapped"),
    [
        (CUT, "cuda", True),
        (CUT, "", True),
        (CUT, "cpu", False),
        ((*CUT, "cluster.device=cpu"), "", False),
        ((*CUT, "parallel.tp_comm_overlap=true"), "cpu", True),
        ((*CUT, "parallel.tp_comm_overlap=false"), "cuda", False),
        (("parallel.tp=2",), "cuda", False),
        (("parallel.sequence_parallel=true",), "cuda", False),
    ],
)
def test_auto_overlaps_on_gpus_alone(overrides, device, is_overlapped):
    job = load_job("jobs/verify.yaml", ["cluster.device=cuda", "parallel.tp=1", *overrides])
    assert overlaps_messages(job, device) is is_overlapped
    assert activation_shape(job).is_tp_overlapped is overlaps_messages(job)


def test_blocks_divide_the_ranks():
    assert {tp: num_blocks(tp) for tp in (2, 3, 4, 5, 6, 7, 8, 16)} == {
        2: 2, 3: 3, 4: 4, 5: 1, 6: 3, 7: 1, 8: 4, 16: 4,
    }  # fmt: skip
