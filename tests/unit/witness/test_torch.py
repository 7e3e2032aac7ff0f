"""torch's own optimizers and scaler as witnesses: Muon, and the loss scale of torch.amp."""

import pytest
import torch

from raymega.config.schema import OptimizerSection, PrecisionSection
from raymega.optim.loss_scale import LossScale, next_loss_scale
from tests.support.params import make_optimizer, make_param, make_tensor

NUM_STEPS = 4


def _gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)).double()


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (6, 6), (1, 7)], ids=str)
def test_muon_is_torchs_in_float64(shape, monkeypatch):
    """torch's iterates in bfloat16; its momentum has another scale, which the iteration divides away."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    section = OptimizerSection(name="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)
    param = make_param(make_tensor("w", shape))
    theirs = torch.nn.Parameter(param.detach().clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=section.lr, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw",
        ns_steps=section.newton_schulz_steps,
    )  # fmt: skip
    buffer, _, mine = make_optimizer([param], section)
    start = param.detach().clone()
    for step in range(NUM_STEPS):
        theirs.grad = _gradient(shape, step)
        optimizer.step()
        buffer.view(param).copy_(_gradient(shape, step))
        mine.step(lr=section.lr, step=step + 1)
    moved = (theirs.detach() - start).abs().max()
    assert (
        param.detach() - theirs.detach()
    ).abs().max() < 1e-6 * moved  # eps is added, or a minimum


def test_loss_scale_is_that_of_torch_amp():
    """Which knows no hysteresis and no minimum; an infinite gradient is an overflow."""
    section = PrecisionSection(
        dtype="float16", loss_scale=2.0**10, loss_scale_window=3, loss_scale_hysteresis=1,
        min_loss_scale=2.0**-60,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scale = torch.optim.SGD([param], lr=0.1), LossScale(factor=2.0**10)
    draws = torch.rand(200, generator=torch.Generator().manual_seed(1)).tolist()
    for number, draw in enumerate(draws):
        is_overflow = draw < (0.4 if number // 25 % 2 else 0.1)
        scaler.scale(param.sum()).backward()
        if is_overflow:
            param.grad[1] = torch.inf
        before = param.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(before, param.detach()) == is_overflow
        scaler.update()
        optimizer.zero_grad()
        scale = next_loss_scale(scale, section, is_overflow=is_overflow)
        assert scale.factor == scaler.get_scale(), number
