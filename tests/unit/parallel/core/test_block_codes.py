"""NF4 and fp8 blocks: QLoRA's published arithmetic, and parts of a tensor as the whole."""

import numpy as np
import pytest
import torch

from raymega.box import Box
from raymega.config.lora import LoraSection
from raymega.convert.tuned import coded_base
from raymega.parallel.core import block_codes
from raymega.plan.layers.base_blocks import box_blocks, dynamic_values, format_values, scale_bytes
from raymega.plan.memory.elements import coded_elements
from raymega.plan.tensor_table import model_tensors
from tests.support.references.qlora import NF4, dynamic_map, through_nf4
from tests.unit.convert.folders import make_model

SHAPES = [(48, 96), (3, 30, 130), (300, 64), (160, 40)]


def _drawn(shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_the_published_arithmetic(shape):
    weight = _drawn(shape)
    wanted = [through_nf4(matrix) for matrix in weight.view(-1, *shape[-2:]).numpy()]
    found = block_codes.through_blocks(weight, "nf4").numpy()
    np.testing.assert_array_equal(found, np.stack(wanted).reshape(shape))


def test_values_are_published_and_codes_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(np.float32(format_values("nf4")), NF4)
    np.testing.assert_array_equal(np.float32(dynamic_values()), dynamic_map())
    # what bitsandbytes 0.50 gives for this matrix
    waves = torch.sin(torch.arange(8 * 128, dtype=torch.float32) ** 1.5).view(8, 128)
    weight = waves * (torch.arange(1, 9)[:, None] * 0.01)
    maxima = block_codes.block_maxima(weight, 0)
    codes = block_codes.pack(block_codes.encode(weight, maxima, 0, "nf4").view(-1), "nf4")
    assert bytes(codes[:24].tolist()).hex() == "7eb0f0e42fa01aeffeefffc301df21e90f44e0f0f0f1ba1f"
    scales = block_codes.encode_scales(maxima.view(1, -1))
    assert scales.codes.tolist() == [
        [0, 0, 20, 20, 40, 40, 60, 60, 194, 194, 214, 214, 234, 234, 255, 255]
    ]


@pytest.mark.parametrize("base_dtype", ["nf4", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_merges_in_numpy_have_the_same_bits(shape, base_dtype):
    weight = _drawn(shape)
    found = coded_base.through_blocks(weight.numpy(), base_dtype)
    np.testing.assert_array_equal(found, block_codes.through_blocks(weight, base_dtype).numpy())


@pytest.mark.parametrize("base_dtype", ["nf4", "fp8"])
def test_an_expert_is_coded_as_if_it_were_alone(base_dtype):
    # sizes as far apart as sums of rounded scales could be
    sizes = torch.tensor([1.0, 1e-9, 1e-20, 0.0]).view(4, 1, 1)
    experts = _drawn((4, 30, 130), torch.float32) * sizes
    found = block_codes.through_blocks(experts, base_dtype)
    alone = [block_codes.through_blocks(expert, base_dtype) for expert in experts]
    assert torch.equal(found, torch.stack(alone))
    in_numpy = coded_base.through_blocks(experts.double().numpy(), base_dtype)
    np.testing.assert_array_equal(in_numpy, found.numpy())


def test_fp8_has_the_values_of_e4m3_and_loses_less():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = every[every.isfinite()].unique()
    assert torch.equal(torch.tensor(format_values("fp8")), finite / finite.max())
    weight = _drawn((64, 128))
    lost = {
        name: float((block_codes.through_blocks(weight, name) - weight).norm() / weight.norm())
        for name in ("nf4", "fp8")
    }
    assert 0.08 < lost["nf4"] < 0.11
    assert 0.02 < lost["fp8"] < 0.03


@pytest.mark.parametrize("base_dtype", ["nf4", "fp8"])
def test_zeros_stay_zeros(base_dtype):
    weight = torch.zeros(4, 130)
    assert torch.equal(block_codes.through_blocks(weight, base_dtype), weight)


def test_codes_of_columns_that_begin_inside_a_block_are_those_of_the_whole():
    weight = _drawn((6, 200))
    maxima = block_codes.block_maxima(weight, 0)
    whole = block_codes.encode(weight, maxima, 0, "nf4")
    first, count = box_blocks(Box(offset=(0, 80), shape=(6, 70)))
    part = block_codes.encode(weight[:, 80:150], maxima[:, first : first + count], 80, "nf4")
    assert torch.equal(part, whole[:, 80:150])
    local = block_codes.block_maxima(weight[:, 80:150], 80)
    assert local.shape == (6, count)
    assert (local <= maxima[:, first : first + count]).all()


def test_codes_survive_packing_at_any_place():
    codes = torch.arange(15, dtype=torch.uint8)
    packed = block_codes.pack(codes, "nf4")
    assert len(packed) == 8
    assert block_codes.unpack(packed, 3, 12, "nf4").tolist() == [*range(3, 12)]


def test_a_base_in_blocks_takes_about_four_bits_an_element():
    model = make_model(
        hidden_size=256, ffn_hidden_size=512, lora=LoraSection(r=2, base_dtype="nf4")
    )
    held = [(t, t.whole) for t in model_tensors(model)]
    found = coded_elements(held)
    matrices = [t for t, _ in held if t.role == "matrix" and t.is_frozen]
    assert found.dense == sum(t.num_elements for t in matrices)
    assert {t.base_dtype for t, _ in held if t not in matrices} == {"compute"}
    # 4 bits, 8 for 64 elements, 32 for 256 of those, and a mean a matrix
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    exact = found.dense * bits / 8 + 4 * len(matrices)
    assert found.held_bytes(1, 1) == pytest.approx(exact, rel=1e-3)
    assert found.held_bytes(4, 1) < found.held_bytes(1, 1) / 3
    assert scale_bytes((8, 64), Box.whole((8, 64))) == 8 + 8
