"""The bound on memory under attention dropout: bytes as kept, the message's numbers, its remedies."""

import re

import pytest

from raymega.errors import PlanError
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.attention_bytes import attention_weight_bytes
from raymega.plan.validation.attention import MAX_ATTENTION_BYTES
from tests.support.jobs import make_test_plan

DROPPED = ["model.attention_dropout=0.1", "parallel.pp=1", "model.max_positions=1000000"]


def _plan(seq_len, *overrides):
    return make_test_plan(*DROPPED, f"data.seq_len={seq_len}", *overrides)


def _layer_bytes(plan):
    return attention_weight_bytes(activation_shape(plan.job))


@pytest.mark.parametrize(
    ("overrides", "row_bytes"),
    [
        ([], 2 * 8 * 17),  # micro-batch 2, 8 heads, float64 before and after, a mask
        (["precision.dtype=bfloat16"], 2 * 8 * 5),
        (["parallel.tp=4"], 2 * 2 * 17),
        (["schedule.micro_batch_size=1"], 8 * 17),
    ],
    ids=["float64", "bfloat16", "tp4", "micro-batch 1"],
)
def test_longest_sequence_that_the_message_names_is_the_longest(overrides, row_bytes):
    longest = int((MAX_ATTENTION_BYTES / row_bytes) ** 0.5)
    plan = _plan(longest, *overrides)
    assert _layer_bytes(plan) == row_bytes * longest**2 <= MAX_ATTENTION_BYTES
    with pytest.raises(PlanError, match=r"model\.attention_dropout=0\.1.*GiB") as refusal:
        _plan(longest + 1, *overrides)
    assert int(re.search(r"data\.seq_len of at most (\d+)", str(refusal.value))[1]) == longest


def test_without_dropout_of_attention_no_sequence_is_too_long():
    assert make_test_plan("data.seq_len=500000", "model.max_positions=1000000").job
