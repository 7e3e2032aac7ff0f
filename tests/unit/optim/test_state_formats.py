"""State in fewer bits: what codes can say, what rounding costs, and which scales are whose."""

from dataclasses import replace

import pytest
import torch

from raymega.box import Box
from raymega.config.schema import OptimizerSection
from raymega.optim.state_formats import dynamic_codes
from raymega.parallel.comm.process_groups import Group, WaitTimer
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.comm.work import Work
from raymega.parallel.data_parallel import quantized_scales
from raymega.parallel.data_parallel.quantized_scales import ScaleReducer
from raymega.plan.memory.quantized_blocks import BLOCK, scale_boxes
from tests.support.params import ALONE, make_optimizer, make_param, make_tensor

SHAPE = (6, 2 * BLOCK + 40)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_256_values_in_order_that_can_say_zero_and_the_largest(is_signed):
    codes = dynamic_codes(is_signed=is_signed)
    assert codes.shape == (256,) and (codes.diff() > 0).all()
    assert codes[-1] == 1 and (codes == 0).any() and (codes[0] < 0) == is_signed
    # the middle of the last of 64 or 128 even parts of 0.1 to 1, in float64
    assert codes[-2].item() == pytest.approx(1 - 0.45 / (64 if is_signed else 128), rel=1e-15)


@pytest.mark.parametrize(
    ("begin", "size", "everything", "begun"),
    [
        (0, 300, (0, 2), (0, 2)),
        (256, 10, (1, 1), (1, 1)),
        (100, 300, (0, 2), (1, 1)),
        (300, 20, (1, 1), (2, 0)),
    ],
)
def test_a_box_has_the_scales_of_all_its_blocks_and_begins_some(begin, size, everything, begun):
    boxes = scale_boxes(Box(offset=(3, begin), shape=(2, size)))
    assert boxes.all == Box(offset=(3, everything[0]), shape=(2, everything[1]))
    assert boxes.begun == Box(offset=(3, begun[0]), shape=(2, begun[1]))


def _trained(section, steps=3):
    """A parameter after some updates, with the optimizer's kept and opened blocks by kind."""
    param = make_param(make_tensor("w", SHAPE))
    buffer, _, optimizer = make_optimizer([param], section)
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        gradient = torch.randn(SHAPE, generator=source, dtype=torch.float64)
        buffer.view(param).copy_(gradient * torch.logspace(-4, 0, SHAPE[0]).double()[:, None])
        buffer.view(param)[:, 5] = 0
        optimizer.step(lr=1e-2, step=step + 1)
    return param, {b.kind: b for b in optimizer.blocks()}, {b.kind: b for b in optimizer.values()}


@pytest.mark.parametrize(("state_dtype", "limit"), [("bfloat16", 2**-8), ("8bit", 0.06)])
def test_rounded_state_is_near_to_what_it_rounds(state_dtype, limit):
    section = OptimizerSection(lr=1e-2)
    _, _, wanted = _trained(section, steps=1)
    _, _, found = _trained(section.model_copy(update={"state_dtype": state_dtype}), steps=1)
    for kind in ("adam.exp_avg", "adam.exp_avg_sq"):
        a, b = found[kind].values, wanted[kind].values
        largest = b.abs().amax(-1, keepdim=True)
        assert ((a - b).abs() / largest).max() < limit
        assert (a == 0).equal(b == 0) if kind.endswith("sq") else not a[b == 0].any()


def test_eight_bits_are_a_code_an_element_and_a_scale_a_block():
    _, kept, _ = _trained(OptimizerSection(lr=1e-2, state_dtype="8bit"))
    assert set(kept) == {
        "model", "adam.exp_avg.codes", "adam.exp_avg.scales", "adam.exp_avg_sq.codes",
        "adam.exp_avg_sq.scales",
    }  # fmt: skip
    assert kept["adam.exp_avg.codes"].values.dtype == torch.uint8
    assert kept["adam.exp_avg.scales"].values.shape == (6, 3)
    assert kept["adam.exp_avg.scales"].tensor.shape == (6, 3)


def test_updates_with_rounded_state_stay_near_to_those_without():
    exact, _, _ = _trained(OptimizerSection(lr=1e-2), steps=5)
    for state_dtype, limit in (("bfloat16", 1e-3), ("8bit", 2e-2)):
        section = OptimizerSection(lr=1e-2, state_dtype=state_dtype)
        rounded, _, _ = _trained(section, steps=5)
        assert (rounded - exact).abs().mean() < limit


def test_blocks_of_a_row_that_the_tensor_axis_cuts_have_one_number_on_all_its_ranks():
    whole = make_tensor("w", (4, 300), tp_dim=1)
    parts = [make_param(whole, tp=2, tp_rank=rank) for rank in range(2)]
    for param in parts:
        table = make_optimizer([param], OptimizerSection(lr=1.0))[2]._table
        shared = ScaleReducer(table.buckets, ALONE, lambda _: ("m",), torch.float64, CommLog())
        assert shared.box(param, param.spec.pieces[0], "m").shape == (4, 2)


def test_a_ring_sends_each_number_twice_but_for_the_own_part(monkeypatch):
    group = Group(name="tp", ranks=(0, 1, 2, 3), index=1, timeout_s=1.0, handle=None)
    param = make_param(make_tensor("w", (4, 600), tp_dim=1), tp=4, tp_rank=1)
    table, log = make_optimizer([param], OptimizerSection(lr=1.0))[2]._table, CommLog()
    groups = replace(ALONE, tp=group)
    shared = ScaleReducer(table.buckets, groups, lambda _: ("m",), torch.float64, log)
    done = Work(str, None, None, WaitTimer())
    monkeypatch.setattr(quantized_scales, "start_all_reduce", lambda *_, op: done)
    shared.combine()
    # 4 rows of 3 blocks, 8 bytes each
    assert log.sent_bytes(["scale_reduce"]) == 2 * 96 * 3 // 4
