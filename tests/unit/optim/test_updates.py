"""Every update equals torch's own optimizer, or its paper's program, in groups, on one rank in float64."""

from typing import get_args

import pytest
import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.param_groups import rates_of
from raymega.plan.memory.optimizer_state import KINDS, kinds_of
from tests.support.params import MODEL, make_optimizer, make_param, make_tensor

SHAPES = {"embedding": (8, 3), "head": (8, 3), "matrix": (5, 7), "norm": (7,), "bias": (5,)}
RATES = [1e-2, 2e-2, 1e-2, 3e-3, 1e-2]


def _section(name, **changes):
    return OptimizerSection(
        name=name,
        lr=1.0,
        weight_decay=0.1,
        embedding_lr=0.5,
        head_lr=2.0,
        norm_lr=3.0,
        **changes,
    )


def _rates(role, section):
    return rates_of(make_tensor(role, SHAPES[role], role=role), section, MODEL)


def _params():
    return [make_param(make_tensor(role, shape, role=role)) for role, shape in SHAPES.items()]


def _gradient(param, step):
    source = torch.Generator().manual_seed(100 * step + param.numel())
    return torch.randn(param.shape, generator=source, dtype=torch.float64)


def _lion(section):
    """Chen et al. 2023, program 1."""
    params = [param.detach().clone() for param in _params()]
    moments = [torch.zeros_like(param) for param in params]
    for step, rate in enumerate(RATES):
        for role, x, m in zip(SHAPES, params, moments, strict=True):
            rates, g = _rates(role, section), _gradient(x, step)
            direction = torch.sign(section.beta1 * m + (1 - section.beta1) * g)
            x -= rate * rates.lr_scale * (direction + rates.weight_decay * x)
            m[:] = section.beta2 * m + (1 - section.beta2) * g
    return params


def _torchs_own(section):
    """Values and state of torch's optimizer, which is given groups and a rate a step."""
    params = [param.detach().clone() for param in _params()]
    groups = [
        {"params": [param], "weight_decay": _rates(role, section).weight_decay}
        for role, param in zip(SHAPES, params, strict=True)
    ]
    if section.name == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=section.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)
    for step, rate in enumerate(RATES):
        for role, group in zip(SHAPES, optimizer.param_groups, strict=True):
            group["lr"] = rate * _rates(role, section).lr_scale
        for param in params:
            param.grad = _gradient(param, step)
        optimizer.step()
    return params


@pytest.mark.parametrize("decays", [True, False], ids=["tables-decayed", "tables-not-decayed"])
@pytest.mark.parametrize(
    "section",
    [_section("adamw"), _section("sgd"), _section("sgd", momentum=0.0), _section("lion")],
    ids=["adamw", "sgd", "sgd-without-momentum", "lion"],
)
def test_update_equals_its_reference_with_groups(section, decays):
    section = section.model_copy(update={"is_embedding_decayed": decays})
    reference = _lion if section.name == "lion" else _torchs_own
    params = _params()
    buffer, _, optimizer = make_optimizer(params, section)
    for step, rate in enumerate(RATES):
        for param in params:
            buffer.view(param).copy_(_gradient(param, step))
        optimizer.step(lr=rate, step=step + 1)
    for role, param, wanted in zip(SHAPES, params, reference(section), strict=True):
        torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=1e-14, msg=role)


def test_update_leaves_the_gradients_alone():
    params = _params()
    buffer, _, optimizer = make_optimizer(params, _section("sgd"))
    buffer.view(params[0]).fill_(1.0)
    optimizer.step(lr=0.1, step=1)
    assert buffer.view(params[0]).eq(1.0).all()


def test_every_update_of_the_job_file_has_its_kinds_of_state():
    named, _plugin = get_args(OptimizerSection.model_fields["name"].annotation)
    assert set(KINDS) == set(get_args(named))


@pytest.mark.parametrize("name", KINDS)
def test_state_is_saved_under_the_names_of_its_role(name):
    _, _, optimizer = make_optimizer(_params(), _section(name))
    saved = {(block.kind, block.tensor.name) for block in optimizer.blocks()}
    assert saved == {(k, role) for role in SHAPES for k in ("model", *kinds_of(name, role))}
