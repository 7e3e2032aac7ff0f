"""In bfloat16 and float16 what adds up many numbers is float32: each case breaks otherwise.

References are float64 on the very numbers that the layer is given, so only its own rounding counts.
"""

import math

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from raymega.config.schema import OptimizerSection
from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.tensor_parallel.cross_entropy import LossTerms, vocab_parallel_cross_entropy
from raymega.parallel.tensor_parallel.linear import LinearWeightGrad
from raymega.plan.grid import Grid
from tests.support.params import make_optimizer, make_param, make_tensor

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def _draw(*shape, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator)


@LOW
def test_norms_take_their_statistics_in_float32(dtype):
    """Squares of 500 are beyond float16, and 4096 of them beyond bfloat16's 8 bits."""
    x = _draw(4, 4096, scale=500.0).to(dtype)
    weight = torch.ones(4096, dtype=dtype)
    wide = x.double()
    rms = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        rms_norm(x, weight.shape, weight, 1e-5).double(), rms, rtol=1.5 * ROUNDING[dtype], atol=1e-6
    )
    layer = layer_norm(wide, weight.shape, eps=1e-5)
    found = layer_norm(x, weight.shape, weight, torch.zeros_like(weight), 1e-5).double()
    torch.testing.assert_close(found, layer, rtol=1.5 * ROUNDING[dtype], atol=1e-4)


@LOW
def test_softmax_of_attention_adds_in_float32(dtype):
    """2048 equal weights: a sum in bfloat16 would stop at 256, and give eight times the mean."""
    v = (2.0 + _draw(1, 1, 2048, 16, seed=1)).to(dtype)
    q = k = torch.zeros_like(v)
    y = scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0, -1].double()
    torch.testing.assert_close(y, v.double().mean(2)[0, 0], rtol=8 * ROUNDING[dtype], atol=0)


@LOW
def test_scores_of_attention_are_wider_than_float16(dtype):
    """q k^T is 160000 before the softmax takes its largest away: beyond float16."""
    q = torch.full((1, 1, 8, 64), 50.0, dtype=dtype)
    y = scaled_dot_product_attention(q, q, q, is_causal=True)
    assert y.eq(50.0).all()


@LOW
def test_cross_entropy_and_its_gradient_add_in_float32(dtype):
    """50000 equal logits: the sum of exponentials is beyond float16 after a shift of none."""
    tp = build_groups(Grid(), 0, timeout_s=1).tp
    logits = torch.zeros(1, 1, 50000, dtype=dtype, requires_grad=True)
    label, terms = torch.zeros(1, 1, dtype=torch.int64), LossTerms(vocab_size=50000)
    loss = vocab_parallel_cross_entropy(logits, label, tp, terms)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(math.log(50000), rel=1e-6)
    loss.backward()
    assert float(logits.grad[0, 0, 0]) == pytest.approx(-1.0, rel=ROUNDING[dtype])
    assert float(logits.grad[0, 0, 1]) == pytest.approx(2e-5, rel=2e-2)


@LOW
def test_weight_gradient_of_a_gemm_adds_in_float32(dtype):
    """4096 tokens of 1/4 x 1/4: in bfloat16 the sum would stop at 16."""
    ones = torch.full((4096, 1, 8), 0.25, dtype=dtype)
    assert LinearWeightGrad(ones, ones).compute().eq(256.0).all()
    total = torch.full((8, 8), 7.0)
    for is_first, wanted in ((True, 256.0), (False, 512.0)):
        LinearWeightGrad(ones, ones).add_to(total, is_first=is_first)
        assert total.eq(wanted).all()


@LOW
def test_micro_batches_add_up_in_float32_and_move_a_float32_master(dtype):
    """600 gradients of 1: in bfloat16 they would stop at 256. Then steps below the rounding."""
    param = make_param(make_tensor("w", (4, 4)), dtype=dtype)
    section = OptimizerSection(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    buffer, _, optimizer = make_optimizer([param], section)
    with torch.no_grad():
        param.fill_(1.0)
        for block in optimizer.blocks():
            block.values.fill_(1.0 if block.kind == "model" else 0.0)
    for _ in range(600):
        param.sum().backward()
    sums = buffer.view(param)
    assert sums.dtype == torch.float32 and sums.eq(600.0).all()
    for step in range(1, 601):
        optimizer.step(lr=1e-6 / 6, step=step)
    master = next(block.values for block in optimizer.blocks() if block.kind == "model")
    assert master.dtype == torch.float32
    assert float(master[0, 0]) == pytest.approx(1.0 - 600 * 600 * 1e-6 / 6, rel=1e-4)
    assert torch.equal(param.detach(), master.to(dtype))
