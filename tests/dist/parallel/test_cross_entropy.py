"""Cross entropy over a cut and padded vocabulary equals torch's over the whole one."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from raymega.parallel.core import compile
from raymega.parallel.tensor_parallel.cross_entropy import LossTerms, vocab_parallel_cross_entropy
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.tolerances import BFLOAT16_ROUNDING, FLOAT64_LAYER

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")

S, B, V = 6, 3, 20
PLAIN = LossTerms(vocab_size=V)
TERMS = {
    "plain": PLAIN,
    "smoothing": LossTerms(vocab_size=V, label_smoothing=0.1),
    "z-loss": LossTerms(vocab_size=V, z_loss=0.01),
    "both": LossTerms(vocab_size=V, label_smoothing=0.3, z_loss=1e-3),
}
TABLES = {"no padding": 20, "some": 24, "ranks with padding only": 64}


def _inputs(scale, dtype, *, columns=V):
    """Logits of padded columns are the largest, so that nobody overlooks a leak."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(S, B, columns, generator=generator).double()
    logits[..., V:] = 3.0 * scale
    labels = torch.randint(0, V, (B, S), generator=generator).t()
    return logits.to(dtype), labels, torch.rand(S, B, generator=generator)


def _run(env, logits, labels, grad, terms, is_fused=False):
    tp = env.groups.tp
    mine = logits.chunk(tp.size, -1)[tp.index].contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, labels, tp, terms, is_fused=is_fused)
    losses.backward(grad.to(losses.dtype))
    return losses.detach(), mine.grad


def _run_cases(env, cases):
    return [_run(env, *case) for case in cases]


def _joined(results, case):
    """Losses, equal on all ranks, and the whole gradient of one case."""
    losses = [result[case][0] for result in results]
    assert all(torch.equal(loss, losses[0]) for loss in losses), "ranks disagree"
    return losses[0], torch.cat([result[case][1] for result in results], -1)


def _wanted(logits, labels, grad, terms):
    logits = logits.double().requires_grad_()
    real = logits[..., :V].flatten(0, 1)
    losses = cross_entropy(
        real, labels.flatten(), reduction="none", label_smoothing=terms.label_smoothing
    )
    losses = (losses + terms.z_loss * real.logsumexp(-1).square()).view(S, B)
    losses.backward(grad.double())
    return losses.detach(), logits.grad


@degrees
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(tp):
    cases = [
        (*_inputs(scale, torch.float64, columns=columns), terms)
        for scale in (1.0, 1e4)
        for columns in TABLES.values()
        for terms in TERMS.values()
    ]
    results = run_grid(_run_cases, Grid(tp=tp), cases)
    for case, inputs in enumerate(cases):
        losses, grad = _joined(results, case)
        wanted, grad_wanted = _wanted(*inputs)
        assert losses.dtype == torch.float64
        assert plain_models.difference(losses, wanted) < FLOAT64_LAYER, case
        assert plain_models.difference(grad, grad_wanted) < FLOAT64_LAYER, case
        assert not grad[..., V:].any(), "padding got a gradient"


@degrees
def test_bfloat16_logits_give_float32_losses(tp):
    inputs = *_inputs(3.0, torch.bfloat16), TERMS["both"]
    losses, grad = _joined(run_grid(_run_cases, Grid(tp=tp), [inputs]), 0)
    wanted, grad_wanted = _wanted(*inputs)
    assert losses.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert plain_models.difference(losses, wanted) < 1e-6
    assert plain_models.difference(grad, grad_wanted) < BFLOAT16_ROUNDING


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("terms", ["plain", "both"])
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, FLOAT64_LAYER), (torch.bfloat16, BFLOAT16_ROUNDING)],
    ids=["float64", "bfloat16"],
)
def test_compiled_losses_and_gradients_are_those_of_the_whole_vocabulary(
    dtype, limit, terms, columns
):
    """Where a rank holds tokens and padding, and where it holds padding only."""
    # Asked here, as every rank imports this module and the answer loads torch's compiler.
    if not compile.can_fuse(torch.device("cpu")):
        pytest.skip("torch.compile finds no C++ compiler")
    inputs = *_inputs(3.0, dtype, columns=columns), TERMS[terms]
    losses, grad = _joined(run_grid(_run_cases, Grid(tp=2), [(*inputs, True)]), 0)
    wanted, grad_wanted = _wanted(*inputs)
    assert plain_models.difference(losses, wanted) < min(limit, 1e-6)
    assert plain_models.difference(grad, grad_wanted) < limit
    assert not grad[..., V:].any(), "padding got a gradient"


@pytest.mark.sample(4)
@degrees
@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
def test_labels_outside_the_vocabulary_are_finite_and_harmless(tp, columns):
    logits, _, _ = _inputs(1.0, torch.float64, columns=columns)
    labels = torch.tensor([-100, -1, V, V + 1, 2**40, 0]).repeat(B, 1).t()
    cases = [(logits, labels, torch.zeros(S, B), terms) for terms in TERMS.values()]
    results = run_grid(_run_cases, Grid(tp=tp), cases)
    for case in range(len(cases)):
        losses, grad = _joined(results, case)
        assert all(math.isfinite(loss) for loss in losses.flatten().tolist())
        assert not grad.any()
