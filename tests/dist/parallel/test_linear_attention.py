"""Gated delta nets and Mamba-2 on tensor- and context-parallel ranks equal the recurrence written out, in float64."""

import pytest
import torch

from raymega.config.parallel import ParallelSection
from raymega.model.linear_attention.gated_delta_net import GatedDeltaNet
from raymega.model.linear_attention.mamba2 import Mamba2
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import (
    Rows,
    held_positions,
    make_context,
    make_token_layout,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.tensor_table import layer_tensors
from tests.support.ranks import run_grid
from tests.support.references import plain_models, plain_states
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_factory

pytestmark = pytest.mark.dist

AT = "layers.0.linear_attention"
SIZES = {
    "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 6, "value_head_dim": 5, "conv_kernel_dim": 3,
}  # fmt: skip
MODELS = {
    "gated_delta_net": plain_models.make_model(
        "qwen3_next",
        attention={"layer_types": ("gated_delta_net", "full")},
        linear_attention=SIZES,
    ),
    "mamba2": plain_models.make_model(
        "nemotron_h",
        attention={"layer_types": ("mamba2", "feed_forward")},
        linear_attention={**SIZES, "time_step_min": 0.5},
    ),
}
LAYERS = {"gated_delta_net": GatedDeltaNet, "mamba2": Mamba2}
PLAIN = {"gated_delta_net": plain_states.delta_net, "mamba2": plain_states.mamba}


def _tensors(kind):
    return [each for each in layer_tensors(MODELS[kind], 0) if each.name.startswith(AT)]


ROWS = {"whole": ((24,),), "packed": ((16, 8), (8, 16))}
B = 2
LAYOUTS = {
    "tp2": (2, 1, False, "ring"), "tp2-sp": (2, 1, True, "ring"), "tp4": (4, 1, False, "ring"),
    "cp2-ring": (1, 2, False, "ring"), "cp4-hybrid": (1, 4, False, "hybrid"),
    "cp4-all_to_all": (1, 4, False, "all_to_all"), "tp2-sp-cp2": (2, 2, True, "all_gather"),
}  # fmt: skip


def _draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(24, B, 48, generator=generator).double()


def _run(env, kind, is_cut, method, rows, is_remade):
    sp = SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_cut)
    sizes = ParallelSection(cp=env.groups.cp.size, cp_method=method)
    context = make_context(env.groups, sizes, CommLog())
    tensors = _tensors(kind)
    layer = LAYERS[kind](make_factory(tensors, sp=sp), AT, MODELS[kind])
    layer.is_remade = is_remade
    plain_models.fill(layer.parameters(), plain_models.draw_weights(tensors))
    held = held_positions(rows, context)
    at = sp.own(held.t().expand(-1, B))
    x, grad = (_draw(seed)[at, torch.arange(B)] for seed in (1, 2))
    x.requires_grad_()
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    own = Rows(positions.gather(1, held), rows)
    y = layer(x, make_token_layout(own, context, has_whole_rows=True))
    y.backward(grad)
    gradients = plain_models.gradient_blocks(layer.parameters())
    return at, y.detach(), x.grad, gradients


def _wanted(kind, rows):
    drawn = plain_models.draw_weights(_tensors(kind))
    weights = {name: values.requires_grad_() for name, values in drawn.items()}
    ends = {name.removeprefix(f"{AT}."): values for name, values in weights.items()}
    x = _draw(1).requires_grad_()
    y = plain_states.layer(PLAIN[kind], MODELS[kind], ends, x, rows)
    y.backward(_draw(2))
    return y.detach(), x.grad, {name: values.grad for name, values in weights.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("is_remade", [False, True], ids=["kept", "remade"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layer_is_the_recurrence_on_each_grid(layout, rows, is_remade, kind):
    tp, cp, is_cut, method = layout
    inner = {"all_to_all": cp, "hybrid": 2}.get(method, 1)
    options = (kind, is_cut, method, rows, is_remade)
    ranks = run_grid(_run, Grid(tp=tp, cp=cp), *options, hierarchical_cp_size=inner)
    y, grad_x, gradients = _wanted(kind, rows)
    for name, whole, place in (("output", y, 1), ("input", grad_x, 2)):
        found = torch.full_like(whole, torch.nan)
        for rank in ranks:
            found[rank[0], torch.arange(B)] = rank[place]
        assert plain_models.difference(found, whole) < FLOAT64_LAYER, name
    # cp ranks and, for what all tp ranks hold, tp ranks have terms of a sum
    whole = plain_models.assemble(gradients, [block for *_, held in ranks for block in held])
    for name, wanted in gradients.items():
        assert plain_models.difference(whole[name], wanted) < FLOAT64_LAYER, name
