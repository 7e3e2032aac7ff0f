"""Runs whose activations and state wait on the host are the runs without, bit for bit, on every kind of layout."""

import numpy as np
import pytest

from tests.support.jobs import T5, layout_overrides
from tests.support.training import train

pytestmark = pytest.mark.dist

LION = ("optimizer.name=lion", "optimizer.lr=1e-3", "optimizer.state_dtype=bfloat16")
MUON = ("optimizer.name=muon", "optimizer.state_dtype=8bit")
CASES = [
    (
        "pp2-dp2",
        ("schedule.name=zb_h1", "parallel.sharding=parameters", "model.hidden_dropout=0.2"),
    ),
    ("tp2-sp", ("model.moe.num_experts=4", "memory.recompute=selective", "parallel.ep=2")),
    ("dp2", (*LION, "parallel.sharding=optimizer")),
    ("tp2-dp2", (*MUON, "parallel.sharding=parameters")),
    ("tp2", (*MUON, "model.moe.num_experts=4", "precision.dtype=bfloat16")),
    ("cp2", ("memory.recompute=full", "memory.recompute_every=2", "precision.fp8=rowwise")),
    (
        "tp2",
        (*T5, "model.hidden_dropout=0.2", "precision.fp8=rowwise", "precision.fp8_end_blocks=0"),
    ),
    ("pp2", (*T5, "memory.recompute=full", "memory.recompute_every=3", "schedule.name=zb_h1")),
    ("cp2", (*T5, "parallel.cp_method=all_gather", "memory.recompute=selective")),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "options"), CASES, ids=lambda value: str(value[0]))
def test_it_changes_no_bit(layout, options):
    overrides = [*layout_overrides(layout), *options]
    wanted_curves, wanted = train(overrides, steps=2)
    curves, state = train([*overrides, "memory.offload=[activations,optimizer]"], steps=2)
    assert curves == wanted_curves
    for name, values in wanted.items():
        np.testing.assert_array_equal(state[name], values, err_msg=name)
