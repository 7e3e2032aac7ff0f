"""Rules of tensor parallelism, with their numbers."""

from raymega.config.moe import MoeSection
from raymega.plan.validation.tensor_parallel import cut_width_faults


def test_tp_cuts_dense_blocks_and_shared_experts_only():
    everywhere = MoeSection(num_experts=8)
    assert cut_width_faults(4, 6, everywhere, 2) == []
    assert len(cut_width_faults(4, 6, MoeSection(num_experts=8, layer_freq=2), 2)) == 1
    (fault,) = cut_width_faults(
        4, 6, MoeSection(num_experts=8, shared_expert_intermediate_size=10), 2
    )
    assert (
        "divide model.moe.shared_expert_intermediate_size=10 (remainder 2); use one of 1, 2, 5, 10"
        in str(fault)
    )
