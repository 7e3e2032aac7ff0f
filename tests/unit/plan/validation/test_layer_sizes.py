"""Rules of sizes that differ by layer."""

from raymega.config.attention import LayerSizesSection
from raymega.plan.validation.families.layer_sizes import cut_faults

SIZES = LayerSizesSection(num_heads=(4, 6), num_kv_heads=(4, 3, 2))


def _faults(num_layers, further, sizes=SIZES, tp=1):
    return cut_faults(sizes, 6, 4, 8, num_layers, further, tp, 1, "ring", 1)


def test_blocks_of_further_tokens_have_sizes_that_fit_too():
    """The block after three layers has the heads of the second and the key heads of the first: 6 and 4."""
    assert _faults(3, 0) == []
    (fault,) = _faults(3, 1)
    assert fault.fact == "model.num_kv_heads=4, layer 3"


def test_a_huge_number_of_layers_is_judged_by_one_period():
    (fault, *_) = _faults(10**18, 0, LayerSizesSection(ffn_hidden_size=(8, 6)), tp=4)
    assert "model.num_heads=6" in fault.rule
