"""Refusals of packed documents and of dynamic context parallelism, each with its numbers."""

from __future__ import annotations

import pytest

from raymega.errors import PlanError
from tests.support.jobs import make_test_plan

PACKED = ("data.packing=best_fit",)
DYNAMIC = (*PACKED, "parallel.dynamic_cp=true", "schedule.micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.document_multiple=4",), "only data.packing=best_fit"),
        ((*PACKED, "data.document_multiple=5"), "divide data.seq_len=32 .remainder 2"),
        ((*PACKED, "model.attention_dropout=0.1"), "see their own document only"),
        ((*PACKED, "parallel.cp=2", "parallel.dp=1"), "2 . cp = 4 chunks.*document_multiple=1"),
        (
            ("parallel.dynamic_cp=true", "parallel.dp=2", "schedule.micro_batch_size=1"),
            "data.packing=none",
        ),
        ((*DYNAMIC, "parallel.dp=3"), "must fill dp . cp = 3.*use dp . cp = 2"),
        ((*DYNAMIC, "parallel.cp=2", "parallel.cp_method=all_to_all"), "heads cannot be exchanged"),
        ((*DYNAMIC, "schedule.micro_batch_size=2"), "a micro-batch is one pack"),
        ((*DYNAMIC, "tracking.activations_every=5"), "count padding"),
        ((*DYNAMIC, "data.seq_len=31"), "2 must divide it .remainder 1"),
    ],
)
def test_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_test_plan(*overrides)


def test_dynamic_cp_needs_no_padded_documents() -> None:
    make_test_plan(*DYNAMIC, "parallel.cp=4", "parallel.dp=2")
