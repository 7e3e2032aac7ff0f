"""Attention, feed-forward, block and whole stages on tp ranks equal the plain one-rank model."""

import pytest
import torch

from raymega.model.families import make_block, make_positions
from raymega.plan.grid import Grid
from raymega.plan.tensors import layer_tensors, model_tensors
from tests.support import reference
from tests.support.ranks import run_grid
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import CPU, make_factory, make_stage_modules, run_stages

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")

MODELS = {
    "gpt2": reference.make_model("gpt2"),
    "llama": reference.make_model("llama", num_kv_heads="num_heads"),
    "llama-gqa": reference.make_model("llama"),
    "llama-rope3": reference.make_model("llama", rope_scaling="llama3", rope_original_positions=8),
    "qwen2": reference.make_model("qwen2"),
    "qwen3": reference.make_model("qwen3"),
}
S, B = 7, 3


def _draw(seed, width):
    return torch.randn(S, B, width, generator=torch.Generator().manual_seed(seed)).double()


def _run_parts(env, model):
    """Output, input gradient and weight gradients of a block and of its two parts."""
    factory = make_factory(layer_tensors(model, 1), tp=env.groups.tp)
    positions = make_positions(model, dtype=torch.float64, device=CPU)
    block = make_block(factory, 1, model, positions)
    reference.fill(block.parameters(), reference.draw_weights(layer_tensors(model, 1)))
    results = {}
    for name, part in {"attention": block.attention, "mlp": block.mlp, "block": block}.items():
        block.zero_grad()
        x = _draw(1, model.width).requires_grad_()
        y = part(x)
        y.backward(_draw(2, model.width))
        results[name] = y.detach(), x.grad, reference.gradient_blocks(part.parameters())
    return results


def _wanted(model, name):
    """Output, input gradient and weight gradients by the plain model."""
    weights = reference.draw_weights(layer_tensors(model, 1))
    leaves = {key: values.requires_grad_() for key, values in weights.items()}
    at = "layers.1" if name == "block" else f"layers.1.{name}"
    x = _draw(1, model.width).requires_grad_()
    y = getattr(reference, name)(model, leaves, at, x.transpose(0, 1)).transpose(0, 1)
    y.backward(_draw(2, model.width))
    return y, x.grad, {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


@degrees
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_block_and_its_parts(tp, model):
    results = run_grid(_run_parts, Grid(tp=tp), model)
    for name in ("attention", "mlp", "block"):
        wanted_y, wanted_grad_x, wanted_grads = _wanted(model, name)
        blocks = []
        for y, grad_x, held in (result[name] for result in results):
            assert reference.difference(y, wanted_y) < FLOAT64_LAYER, name
            assert reference.difference(grad_x, wanted_grad_x) < FLOAT64_LAYER, name
            blocks += held
        whole = reference.assemble(wanted_grads, blocks)
        for tensor, wanted in wanted_grads.items():
            assert reference.difference(whole[tensor], wanted) < FLOAT64_LAYER, tensor


def _run_stages(env, model, num_stages):
    """Loss, gradients, and this rank's gradients of replicated parameters."""
    modules = make_stage_modules(model, num_stages=num_stages, tp=env.groups.tp)
    params = [param for module in modules for param in module.parameters()]
    reference.fill(params, reference.draw_weights(model_tensors(model)))
    loss = run_stages(modules, reference.draw_batch(model))
    loss.backward()
    replicated = {
        p.spec.name: p.grad
        for p in params
        if not p.spec.is_partial_over_tp and all(at.tensor.tp_dim < 0 for at in p.spec.pieces)
    }
    return loss.detach(), reference.gradient_blocks(params), replicated


@degrees
@pytest.mark.parametrize("pp", [1, 2, 5], ids=lambda pp: f"pp{pp}")
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_whole_stages(family, is_tied, pp, tp):
    """Five stages hold three layers, so some stages hold none."""
    model = reference.make_model(family, is_embedding_tied=is_tied)
    results = run_grid(_run_stages, Grid(tp=tp), model, pp)
    weights = reference.draw_weights(model_tensors(model))
    wanted = reference.gradients(model, weights, reference.draw_batch(model))
    loss_wanted = wanted.pop("loss")
    whole = reference.assemble(weights, [block for _, held, _ in results for block in held])
    for name, grad in wanted.items():
        assert reference.difference(whole[name], grad) < FLOAT64_LAYER, name
    for loss, _, replicated in results:
        assert reference.difference(loss, loss_wanted) < FLOAT64_LAYER
        for name, grad in replicated.items():
            assert torch.equal(grad, results[0][2][name]), f"{name} differs between ranks"
