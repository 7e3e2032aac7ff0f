"""Attention, feed-forward, block and whole stages on tp ranks equal the plain one-rank model.

With sequence parallelism, and with more ranks than key and value heads.
"""

from itertools import product

import pytest
import torch

from raymega.model.families import make_block, make_positions
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.tensor_table import layer_tensors, model_tensors
from tests.support.params import make_buffer
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import CPU, make_factory, make_stage_modules, run_stages

pytestmark = pytest.mark.dist
LAYOUTS = {"tp1": (1, False), "tp2": (2, False), "tp2-sp": (2, True), "tp4": (4, False)}
LAYOUTS |= {"tp4-sp": (4, True), "tp8": (8, False), "tp8-sp": (8, True)}


def _layouts(*names):
    return pytest.mark.parametrize(("tp", "sp"), [LAYOUTS[name] for name in names], ids=names)


MODELS = {
    "gpt2": plain_models.make_model("gpt2"),
    "llama": plain_models.make_model("llama", num_kv_heads="num_heads"),
    "llama-gqa": plain_models.make_model("llama"),
    "llama-rope3": plain_models.make_model(
        "llama", rope_scaling="llama3", rope_original_positions=8
    ),
    "qwen2": plain_models.make_model("qwen2"),
    "qwen3": plain_models.make_model("qwen3"),
    "llama-kv2": plain_models.make_model("llama", num_kv_heads=2),
    "qwen3-kv2": plain_models.make_model("qwen3", num_kv_heads=2),
    "gpt2-kv1": plain_models.make_model("gpt2", num_kv_heads=1),
}
MLA = {
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 8,
        "rope_beta_fast": 4.0, "rope_theta": 100.0, "rope_mscale_all_dim": 0.7}  # fmt: skip
MODELS |= {
    "mla": plain_models.make_model("llama", num_kv_heads="num_heads", mla=MLA),
    "mla-yarn": plain_models.make_model(
        "llama", num_kv_heads="num_heads", mla={**MLA, "q_lora_rank": 0, "v_head_dim": 10}, **YARN
    ),
    "llama-yarn": plain_models.make_model("llama", **{**YARN, "rope_mscale_all_dim": 0.0}),
}
S, B = 8, 3


def _draw(seed, width):
    return torch.randn(S, B, width, generator=torch.Generator().manual_seed(seed)).double()


def _positions(x, sp):
    """What this rank holds of the stream."""
    return x.chunk(sp.degree)[sp.tp.index if sp.degree > 1 else 0].clone()


def _run_parts(env, is_sp):
    """Output, input gradient and weight gradients of each model's block and of its two parts."""
    sp = SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_sp)
    return {key: _run_model(sp, model) for key, model in MODELS.items()}


def _run_model(sp, model):
    factory = make_factory(layer_tensors(model, 1), sp=sp)
    positions = make_positions(model, dtype=torch.float64, device=CPU)
    block = make_block(factory, 1, model, positions)
    plain_models.fill(block.parameters(), plain_models.draw_weights(layer_tensors(model, 1)))
    results = {}
    for name, part in {"attention": block.attention, "mlp": block.mlp, "block": block}.items():
        block.zero_grad()
        x = _positions(_draw(1, model.hidden_size), sp).requires_grad_()
        y = part(x)
        y.backward(_positions(_draw(2, model.hidden_size), sp))
        results[name] = y.detach(), x.grad, plain_models.gradient_blocks(part.parameters())
    return results


def _wanted(model, name):
    """Output, input gradient and weight gradients by the plain model."""
    weights = plain_models.draw_weights(layer_tensors(model, 1))
    leaves = {key: values.requires_grad_() for key, values in weights.items()}
    at = "layers.1" if name == "block" else f"layers.1.{name}"
    x = _draw(1, model.hidden_size).requires_grad_()
    y = getattr(plain_models, name)(model, leaves, at, x.transpose(0, 1)).transpose(0, 1)
    y.backward(_draw(2, model.hidden_size))
    return y, x.grad, {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.sample(1)
@_layouts(*LAYOUTS)
def test_block_and_its_parts(tp, sp):
    ranks = run_grid(_run_parts, Grid(tp=tp), sp)
    for key, name in product(MODELS, ("attention", "mlp", "block")):
        wanted_y, wanted_grad_x, wanted_grads = _wanted(MODELS[key], name)
        ys, grads_x, held = zip(*(rank[key][name] for rank in ranks), strict=True)
        if sp:
            ys, grads_x = [torch.cat(ys)], [torch.cat(grads_x)]
        for y, grad_x in zip(ys, grads_x, strict=True):
            assert plain_models.difference(y, wanted_y) < FLOAT64_LAYER, (key, name)
            assert plain_models.difference(grad_x, wanted_grad_x) < FLOAT64_LAYER, (key, name)
        whole = plain_models.assemble(wanted_grads, [block for blocks in held for block in blocks])
        for tensor, wanted in wanted_grads.items():
            assert plain_models.difference(whole[tensor], wanted) < FLOAT64_LAYER, (key, tensor)


def _run_stages(env, sp, models, num_stages):
    return [_run_stages_of(env, sp, model, num_stages) for model in models]


def _run_stages_of(env, is_sp, model, num_stages):
    """Loss, and the gradients that the buffer makes of every rank's terms: what counts, and all."""
    sp = SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_sp)
    modules = make_stage_modules(model, num_stages=num_stages, sp=sp)
    params = [param for module in modules for param in module.parameters()]
    plain_models.fill(params, plain_models.draw_weights(model_tensors(model)))
    buffer = make_buffer(params, env.groups)
    loss = run_stages(modules, plain_models.draw_batch(model, seq=S))
    loss.backward()
    buffer.finish()
    pieces = [
        (piece, param.spec.is_tied, buffer.view(param)[piece.place].clone())
        for param in params
        for piece in param.spec.pieces
    ]
    counted = [(p.tensor.name, p.box, grad) for p, tied, grad in pieces if tied or p.is_primary]
    further = torch.tensor(modules[-1].take_mtp_loss_sum(), dtype=torch.float64)
    return (
        (loss.detach(), further),
        counted,
        [(p.tensor.name, p.box, grad) for p, _, grad in pieces],
    )


@pytest.mark.sample(1)
@_layouts("tp1", "tp2", "tp4-sp")
@pytest.mark.parametrize("pp", [1, 2, 5], ids=lambda pp: f"pp{pp}")
def test_whole_stages(pp, tp, sp):
    """Five stages hold three layers, so some stages hold none."""
    models = [
        plain_models.make_model(family, tie_word_embeddings=is_tied)
        for family in ("gpt2", "llama", "qwen2", "qwen3")
        for is_tied in (True, False)
    ]
    _check_stages(tp, sp, models, pp)


@pytest.mark.sample(1)
@_layouts("tp4", "tp8-sp")
def test_whole_stages_with_shared_kv_heads(tp, sp):
    _check_stages(tp, sp, [MODELS["llama-kv2"], MODELS["gpt2-kv1"], MODELS["qwen3-kv2"]], 2)


@pytest.mark.sample(1)
@_layouts("tp1", "tp2-sp", "tp4", "tp8-sp")
def test_whole_stages_with_smoothing_z_loss_and_padding(tp, sp):
    """With 128 rows for 52 tokens some ranks hold padding only."""
    loss = {"label_smoothing": 0.1, "z_loss": 1e-2}
    models = [
        plain_models.make_model(
            "llama", make_vocab_size_divisible_by=multiple, tie_word_embeddings=is_tied, **loss
        )
        for multiple in (8, 128)
        for is_tied in (True, False)
    ]
    _check_stages(tp, sp, models, 2)


@pytest.mark.sample(1)
@_layouts("tp1", "tp2", "tp4-sp")
@pytest.mark.parametrize("pp", [1, 2], ids=lambda pp: f"pp{pp}")
def test_whole_stages_with_latents_and_further_tokens(pp, tp, sp):
    """The last stage has a copy of the token table, whether the head is tied to it or not."""
    latent = {"num_kv_heads": "num_heads", "mla": MLA}
    models = [
        plain_models.make_model(
            "llama", **latent, tie_word_embeddings=is_tied, num_nextn_predict_layers=2
        )
        for is_tied in (True, False)
    ]
    _check_stages(
        tp, sp, [*models, plain_models.make_model("gpt2", num_nextn_predict_layers=1)], pp
    )


def _check_stages(tp, sp, models, pp):
    ranks = run_grid(_run_stages, Grid(tp=tp), sp, models, pp)
    for model, *results in zip(models, *ranks, strict=True):
        _check_model(model, results)


def _check_model(model, results):
    weights = plain_models.draw_weights(model_tensors(model))
    wanted = plain_models.gradients(model, weights, plain_models.draw_batch(model, seq=S))
    wanted_losses = wanted.pop("loss"), wanted.pop("mtp_loss", 0.0)
    whole = plain_models.assemble(
        weights, [block for _, counted, _ in results for block in counted]
    )
    for name, grad in wanted.items():
        assert plain_models.difference(whole[name], grad) < FLOAT64_LAYER, name
    for losses, _, _ in results:
        for loss, loss_wanted in zip(losses, wanted_losses, strict=True):
            assert plain_models.difference(loss, loss_wanted) < FLOAT64_LAYER
    _check_equal_bits([held for *_, held in results])


def _check_equal_bits(ranks):
    """Ranks that hold the same block have the same gradient, so that they stay equal."""
    seen = {}
    for rank in ranks:
        for copy, (name, box, grad) in enumerate(rank):
            first = seen.setdefault((copy, name, box), grad)
            assert torch.equal(grad, first), f"{name} differs between ranks"
