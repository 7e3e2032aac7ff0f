"""Rules of tensor parallelism, with their numbers."""

from raymega.config.attention import AttentionSection
from raymega.config.moe import MoeSection
from raymega.plan.validation.tensor_parallel import cut_width_faults


def test_tp_cuts_dense_blocks_and_shared_experts_only():
    everywhere = MoeSection(num_experts=8)
    assert cut_width_faults(4, 6, everywhere, AttentionSection(), 2) == []
    some = MoeSection(num_experts=8, layer_freq=2)
    assert len(cut_width_faults(4, 6, some, AttentionSection(), 2)) == 1
    (fault,) = cut_width_faults(
        4,
        6,
        MoeSection(num_experts=8, shared_expert_intermediate_size=10),
        AttentionSection(),
        2,
    )
    assert (
        "divide model.moe.shared_expert_intermediate_size=10 (remainder 2); use one of 1, 2, 5, 10"
        in str(fault)
    )


def test_tp_cuts_dense_blocks_where_kinds_of_layers_say_which_they_are():
    experts = MoeSection(num_experts=8)
    kinds = AttentionSection(layer_types=("mamba2", "experts"))
    assert cut_width_faults(4, 6, experts, kinds, 2) == []
    with_dense = AttentionSection(layer_types=("feed_forward", "experts"))
    assert len(cut_width_faults(4, 6, experts, with_dense, 2)) == 1
