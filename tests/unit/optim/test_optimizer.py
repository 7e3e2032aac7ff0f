"""Optimizer: the paper's result, masters of low-precision parameters, exact continuation."""

import numpy as np
import pytest
import torch

from raymega.config.schema import OptimizerSection
from tests.support.params import make_optimizer, make_param, make_tensor

SECTION = OptimizerSection(lr=1e-2, weight_decay=0.1)
ROLES = {"matrix": "matrix", "bias": "bias", "other": "head"}
RATES = [1e-3, 1e-2, 5e-3, 2e-3, 1e-3, 1e-3]


def _params(dtype=torch.float64):
    shapes = {"matrix": (5, 7), "bias": (37,), "other": (3, 3)}
    return [
        make_param(make_tensor(name, shape, role=ROLES[name]), dtype=dtype)
        for name, shape in shapes.items()
    ]


def _gradients(step):
    source = torch.Generator().manual_seed(step)
    shapes = [(5, 7), (37,), (3, 3)]
    return [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]


class _Trainer:
    """Parameters with an optimizer, fed with gradients that depend on the step only."""

    def __init__(self, dtype=torch.float64):
        self.params = _params(dtype)
        self.buffer, _, self.optimizer = make_optimizer(self.params, SECTION)

    def train(self, steps):
        for step in steps:
            for param, gradient in zip(self.params, _gradients(step), strict=True):
                self.buffer.view(param).copy_(gradient)
            self.optimizer.step(lr=RATES[step], step=step + 1)

    def states(self):
        return {(block.kind, block.tensor.name): block.values for block in self.optimizer.blocks()}


def _by_the_paper():
    """Loshchilov and Hutter, Decoupled weight decay regularization, algorithm 2, in numpy."""
    values = [param.detach().numpy().copy() for param in _params()]
    moments = [(np.zeros_like(x), np.zeros_like(x)) for x in values]
    beta1, beta2 = SECTION.beta1, SECTION.beta2
    for step, rate in enumerate(RATES, start=1):
        for x, (m, v), g in zip(values, moments, _gradients(step - 1), strict=True):
            m[:] = beta1 * m + (1 - beta1) * g.numpy()
            v[:] = beta2 * v + (1 - beta2) * g.numpy() ** 2
            m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
            decay = SECTION.weight_decay if x.ndim > 1 else 0.0
            x -= rate * (m_hat / (np.sqrt(v_hat) + SECTION.eps) + decay * x)
    return values


def test_steps_are_those_of_the_paper():
    trainer = _Trainer()
    trainer.train(range(len(RATES)))
    for param, expected in zip(trainer.params, _by_the_paper(), strict=True):
        np.testing.assert_allclose(param.detach(), expected, rtol=0, atol=1e-14)


def test_weight_decay_falls_on_tensors_that_have_it_only():
    trainer = _Trainer()
    before = [param.detach().clone() for param in trainer.params]
    trainer.optimizer.step(lr=0.5, step=1)
    factors = [1 - 0.5 * SECTION.weight_decay, 1.0, 1 - 0.5 * SECTION.weight_decay]
    for param, start, factor in zip(trainer.params, before, factors, strict=True):
        np.testing.assert_allclose(param.detach(), start * factor, rtol=1e-15)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 1e-15), (torch.float32, 1e-6)], ids=["f64", "f32"]
)
def test_a_factor_on_the_gradients_is_the_same_as_gradients_that_have_it(name, dtype, rounding):
    found = []
    for on_the_way, before in ((0.37, 1.0), (1.0, 0.37)):
        params = _params(dtype)
        section = SECTION.model_copy(update={"name": name})
        buffer, _, optimizer = make_optimizer(params, section)
        for step in range(3):
            for param, gradient in zip(params, _gradients(step), strict=True):
                buffer.view(param).copy_(before * gradient)
            optimizer.step(lr=1e-2, step=step + 1, gradient_factor=on_the_way)
        found.append([t.detach() for p in params for t in (p, buffer.view(p))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_precise_parameter_is_its_own_master(dtype):
    trainer = _Trainer(dtype)
    params = {param.spec.name: param for param in trainer.params}
    for block in trainer.optimizer.blocks():
        values, param = block.values, params[block.tensor.name]
        assert values.shape == param.shape and values.dtype == dtype
        assert (values.data_ptr() == param.data_ptr()) == (block.kind == "model")


def test_bfloat16_follows_its_float32_master():
    trainer = _Trainer(torch.bfloat16)
    start = trainer.params[0].detach().clone()
    for step in range(8):
        trainer.buffer.view(trainer.params[0]).fill_(1.0)
        trainer.optimizer.step(lr=1e-4, step=step + 1)
    master = trainer.states()["model", "matrix"]
    assert master.dtype == torch.float32
    assert torch.equal(trainer.params[0], master.to(torch.bfloat16))
    expected = start.float() * (1 - 1e-4 * SECTION.weight_decay) ** 8 - 8e-4
    np.testing.assert_allclose(master, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_continuing_after_a_load_equals_never_stopping_bit_for_bit(dtype):
    whole, first, second = _Trainer(dtype), _Trainer(dtype), _Trainer(dtype)
    whole.train(range(6))
    first.train(range(3))
    saved = {name: tensor.clone() for name, tensor in first.states().items()}
    for name, tensor in second.states().items():
        tensor.copy_(saved[name])
    second.optimizer.sync_weights()
    second.train(range(3, 6))
    for one, other in zip(whole.params, second.params, strict=True):
        assert torch.equal(one, other)
    states = second.states()
    assert all(torch.equal(tensor, states[name]) for name, tensor in whole.states().items())


def test_state_names_each_kind_of_each_parameter_once():
    kinds = ("model", "adam.exp_avg", "adam.exp_avg_sq")
    names = [(block.kind, block.tensor.name) for block in _Trainer().optimizer.blocks()]
    assert names == [(kind, name) for kind in kinds for name in ("other", "bias", "matrix")]
