"""Stages: all layers once, in order, evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.stages import even_stages


@given(num_layers=st.integers(1, 100), num_stages=st.integers(1, 32))
def test_layers_are_split_once_in_order_and_evenly(num_layers, num_stages):
    stages = even_stages(num_layers=num_layers, num_stages=num_stages)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    counts = [stage.num_layers for stage in stages]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("layers", "counts"), [(5, [1, 2, 1, 1]), (6, [1, 2, 2, 1]), (3, [1, 1, 1, 0])]
)
def test_remainder_goes_to_the_middle(layers, counts):
    stages = even_stages(num_layers=layers, num_stages=4)
    assert [stage.num_layers for stage in stages] == counts
    assert stages[0].is_first and stages[-1].is_last
