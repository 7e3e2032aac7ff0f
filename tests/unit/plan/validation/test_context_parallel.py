"""Rules of context parallelism, of packed documents and of dynamic groups, each with its numbers."""

from __future__ import annotations

import pytest

from raymega.config.moe import MoeSection
from raymega.errors import PlanError
from raymega.plan.validation.context_parallel import (
    dynamic_moe_faults,
    exchange_faults,
    position_faults,
    weight_dropout_faults,
)
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


def test_sequence_that_the_chunks_do_not_divide_is_refused():
    (fault,) = position_faults(1, 3, 32, False)
    assert str(fault) == (
        "parallel.cp=3; a sequence is cut into 2 * cp = 6 chunks, two a rank, so that must divide "
        "data.seq_len=32 (remainder 2); set data.seq_len=30, or another parallel.cp"
    )
    (fault,) = position_faults(3, 2, 32, True)
    assert "data.seq_len=32 / parallel.cp=2 = 16 (remainder 1)" in str(fault)
    assert "set data.seq_len=24" in fault.remedy
    assert position_faults(4, 4, 32, True) == [] == position_faults(3, 1, 32, False)


@pytest.mark.parametrize("method, inner, tp, heads, kv_heads, text", [
    ("all_to_all", 2, 1, 6, 6, "it must divide model.num_heads=6 / parallel.tp=1 = 6 (remainder 2)"),
    ("all_to_all", 2, 2, 8, 6, "the 3 that model.num_kv_heads=6 leaves each of parallel.tp=2 ranks"),
    ("hybrid", 3, 1, 8, 8, "it must divide parallel.cp=4 and be neither 1 nor cp; use one of 2"),
    ("hybrid", 4, 1, 8, 8, "use one of 2"),
    ("hybrid", 2, 8, 8, 8, "parallel.hierarchical_cp_size=2 with parallel.cp_method=hybrid; ranks exchange whole"),
])  # fmt: skip
def test_heads_that_ranks_cannot_exchange_are_refused(method, inner, tp, heads, kv_heads, text):
    (fault,) = exchange_faults(4, method, inner, tp, heads, kv_heads)
    assert text in str(fault)


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1, "num_heads"])
def test_heads_that_ranks_can_exchange_are_not_refused(kv_heads):
    assert exchange_faults(4, "all_to_all", 2, 1, 8, kv_heads) == []
    assert exchange_faults(4, "ring", 2, 1, 7, 7) == []


def test_weights_are_dropped_on_whole_rows_only():
    assert (
        weight_dropout_faults(0.1, "llama", 2, "all_to_all")
        == weight_dropout_faults(0.1, "llama", 1, "ring")
        == []
    )
    (fault,) = weight_dropout_faults(0.1, "llama", 2, "ring")
    assert "parallel.cp_method=all_to_all" in fault.remedy


@pytest.mark.parametrize(
    ("fields", "dispatch", "told"),
    [
        ({"capacity_factor": 1.5}, "all_to_all", "capacity_factor=1.5; capacity is of the tokens"),
        (
            {"load_balancing_type": "micro_batch"},
            "all_to_all",
            "load_balancing_type=micro_batch; it depends on the tokens",
        ),
        (
            {"load_balancing_type": "sequence"},
            "all_to_all",
            "load_balancing_type=sequence; it depends on the tokens",
        ),
        (
            {"load_balancing_type": "sinkhorn"},
            "all_to_all",
            "load_balancing_type=sinkhorn; it depends on the tokens",
        ),
        (
            {},
            "all_gather",
            "parallel.moe_token_dispatcher_type=all_gather; it collects equally many tokens",
        ),
    ],
)
def test_what_depends_on_micro_batches_is_refused_under_dynamic_context_parallelism(
    fields, dispatch, told
):
    moe = MoeSection(num_experts=8, **fields)
    (fault,) = dynamic_moe_faults(moe, True, dispatch)
    assert "parallel.dynamic_cp=true with " in str(fault) and told in str(fault)
    assert dynamic_moe_faults(moe, False, dispatch) == []
    assert dynamic_moe_faults(MoeSection(), True, dispatch) == []


def test_what_goes_by_the_token_or_the_last_step_is_not():
    for fields in (
        {},
        {"load_balancing_type": "global"},
        {"expert_bias": True},
        {"router_z_loss_coef": 0.1},
    ):
        assert dynamic_moe_faults(MoeSection(num_experts=8, **fields), True, "all_to_all") == []
