"""Layers of experts on every kind of layout equal a plain loop over experts on one rank.

Each world runs all kinds of routing, by both ways of dispatch: output, input gradient, gradients of
router, experts and shared expert, and what is told of the load.
"""

from dataclasses import replace

import pytest
import torch

from raymega.config.moe import MoeSection
from raymega.model.layers.mlp import GeluMlp, SwigluMlp
from raymega.model.moe.layer import MoeLayer
from raymega.model.moe.router import jitter
from raymega.model.moe.router_stats import Routers
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import alone
from raymega.parallel.context_parallel.context import (
    Context,
    Rows,
    held_positions,
    make_token_ids,
    make_token_layout,
)
from raymega.parallel.core.dropout import TokenKeys
from raymega.parallel.core.weight_grads import run_deferred
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from tests.support.ranks import run_grid
from tests.support.references import moe as plain
from tests.support.references.plain_models import difference
from tests.support.tolerances import FLOAT64_LAYER

pytestmark = pytest.mark.dist
S, B, D, F = 16, 2, 12, 8
BASE = {"num_experts": 8, "top_k": 2}
KINDS = {
    "mixtral": {"load_balancing_type": "micro_batch", "router_aux_loss_coef": 0.3, "router_jitter_noise": 0.2},
    "deepseek": {
        "top_k": 3, "router_score_function": "sigmoid", "n_group": 4, "topk_group": 2, "group_score": "top2",
        "expert_bias": True, "expert_bias_update_rate": 0.1, "routed_scaling_factor": 2.5, "shared_expert_intermediate_size": 8,
        "load_balancing_type": "sequence", "router_aux_loss_coef": 0.2,
    },
    "dropped by probability": {
        "capacity_factor": 0.7, "router_z_loss_coef": 0.1, "norm_topk_prob": False,
        "load_balancing_type": "micro_batch", "router_aux_loss_coef": 0.3,
    },
    "dropped by position": {"capacity_factor": 0.6, "token_drop_policy": "position"},
    "padded": {"capacity_factor": 0.9, "pad_expert_input_to_capacity": True, "shared_expert_intermediate_size": 16,
               "shared_expert_gate": True},
    "switch": {"top_k": 1, "norm_topk_prob": False, "capacity_factor": 0.8, "token_drop_policy": "position",
               "pad_expert_input_to_capacity": True},
    "sinkhorn": {"load_balancing_type": "sinkhorn", "router_z_loss_coef": 0.2},
    "by the last step": {"load_balancing_type": "global", "router_aux_loss_coef": 0.3},
}  # fmt: skip
PLAIN = ("switch",)  # experts without a gate

LAYOUTS = {
    "one": (Grid(), False),
    "etp2 ep2 of tp2 cp2 dp2": (Grid(tp=2, cp=2, dp=2, etp=2, ep=2), False),
    "slow etp2 ep4 of cp4 dp2": (Grid(cp=4, dp=2, etp=2, ep=4, order="ep-cp-tp-dp-pp"), False),
    "ep8 of tp4 cp2": (Grid(tp=4, cp=2, ep=8), True),
    "etp4 ep2 of tp2 dp4": (Grid(tp=2, dp=4, etp=4, ep=2), True),
    "etp2 of tp2 cp2": (Grid(tp=2, cp=2, etp=2), True),
    "slow ep2 of tp2 dp2": (Grid(tp=2, dp=2, ep=2, order="tp-cp-dp-ep-pp"), False),
}


def _moe(kind):
    return MoeSection(**{**BASE, **KINDS[kind]})


def _weights(kind):
    return plain.draw_weights(_moe(kind), width=D, ffn_hidden_size=F, is_gated=kind not in PLAIN)


def _batch(seed, dp):
    """x, the output's gradient, mask and jitter's keys, whole; with equal tokens in two rows."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, dp, S, B, D, generator=generator).double()
    x[:, 3, 1] = x[:, 5, 0]
    mask = torch.ones(dp, S, B, dtype=torch.bool)
    mask[:, S - 5 :, 1] = False
    mask[0, 2, 0] = False
    keys = torch.randint(-(1 << 62), 1 << 62, (dp, S, B), generator=generator)
    return x, grad, mask, keys


def _run(env, sp, kinds, is_deferred):
    return {
        (kind, is_gathered): _run_kind(env, sp, kind, is_gathered, is_deferred)
        for kind in kinds
        for is_gathered in (False, True)
    }


def _run_kind(env, is_sp, kind, is_gathered, is_deferred):
    groups, here = env.groups, env.grid.expert_coords(env.rank)
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=is_sp)
    context = Context(inner=alone(env.rank), outer=groups.cp)
    ranks = ExpertGroups(
        ep=groups.ep,
        etp=groups.etp,
        micro=groups.micro,
        sp=sp,
        is_gathered=is_gathered,
    )
    factory = plain.Factory(
        _weights(kind),
        sp,
        ep=(groups.ep.size, here.ep),
        etp=(groups.etp.size, here.etp),
    )
    mlp = GeluMlp if kind in PLAIN else SwigluMlp
    layer = MoeLayer(factory, "moe", _moe(kind), ranks, mlp)
    layer.router.record.loss_gradient = 2.0
    at = held_positions(((S,),), context)[0]
    x, grad, mask, keys = (part[env.coords.dp][at] for part in _batch(5, env.grid.dp))
    rows = Rows(at[None], ((S,),))
    token_layout = replace(
        make_token_layout(rows, context),
        keys=TokenKeys(own=sp.own(keys), everywhere=keys, rows=None),
        token_ids=make_token_ids(rows, mask.t().double(), context, sp),
    )
    leaf = sp.own(x).clone().requires_grad_()
    y = layer(leaf, token_layout)
    if is_deferred:
        with factory.grad_queue.collecting() as owed:
            y.backward(2 * sp.own(grad))
        assert {id(debt.param) for debt in owed} >= {id(p) for p in layer.experts.parameters()}
        run_deferred(owed)
    else:
        y.backward(2 * sp.own(grad))
    gradients = factory.gradients(layer)
    routers = Routers(
        layers=[0],
        held={0: layer.router},
        num_experts=layer.router.moe.num_experts,
        device=env.device,
    )
    sums = all_reduce(routers.take_sums(), groups.world)
    loads = routers.loads(sums)
    routers.update(sums)
    own = sp.own(at)
    return {
        "own": own, "y": y.detach(), "grad": leaf.grad, "gradients": gradients, "load": loads[0],
        "bias": layer.router.bias, "counts": layer.router.counts,
    }  # fmt: skip


def _wanted(kind, dp):
    moe, weights = _moe(kind), _weights(kind)
    leaves = {name: values.requires_grad_() for name, values in weights.items()}
    x, grad, mask, keys = _batch(5, dp)
    x.requires_grad_()
    layer = MoeLayer(
        plain.Factory(_weights(kind), SequenceParallel(tp=alone(0))), "moe", moe,
        ExpertGroups(ep=alone(0), etp=alone(0), micro=alone(0), sp=SequenceParallel(tp=alone(0))),
        GeluMlp if kind in PLAIN else SwigluMlp,
    )  # fmt: skip
    ys, losses, details = [], [], []
    for number in range(dp):
        noise = None
        if moe.router_jitter_noise:
            flat = keys[number].t().flatten() + layer.router.jitter_key
            noise = jitter(flat, D, moe.router_jitter_noise, torch.float64)
        y, loss, detail = plain.layer(moe, leaves, x[number], mask[number], noise=noise)
        ys.append(y)
        losses.append(loss)
        details.append(detail)
    total = 2 * sum((y * g).sum() for y, g in zip(ys, grad, strict=True)) + 2 * sum(losses)
    total.backward()
    return x, torch.stack(ys), {n: leaf.grad for n, leaf in leaves.items()}, losses, details, mask


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_a_loop_over_experts(name):
    grid, sp = LAYOUTS[name]
    ranks = run_grid(_run, grid, sp, tuple(KINDS), "etp2" in name)
    for kind in KINDS:
        wanted = _wanted(kind, grid.dp)
        for is_gathered in (False, True):
            case = [rank[kind, is_gathered] for rank in ranks]
            _check(grid, sp, kind, case, wanted)


def _check(grid, sp, kind, ranks, wanted):
    x, y, grads, losses, details, mask = wanted
    for rank, got in enumerate(ranks):
        dp = grid.coords(rank).dp
        assert difference(got["y"], y[dp][got["own"]]) < FLOAT64_LAYER, kind
        assert difference(got["grad"], x.grad[dp][got["own"]]) < FLOAT64_LAYER, kind
    _check_gradients(grid, sp, kind, ranks, grads)
    load = ranks[0]["load"]
    counted = [m.t().flatten().tolist() for m in mask]
    chosen, kept = (
        [e for d, c in zip(details, counted, strict=True)
         for experts, is_counted in zip(getattr(d, what), c, strict=True) if is_counted
         for e in experts]
        for what in ("chosen", "kept")
    )  # fmt: skip
    counts = torch.bincount(torch.tensor(chosen), minlength=8)
    assert load.counts.tolist() == counts.tolist(), kind
    assert (load.tokens, load.kept) == (int(mask.sum()), len(kept)), kind
    lost = torch.tensor(load.balance + load.z, dtype=torch.float64)
    assert difference(lost, sum(losses)) < FLOAT64_LAYER, kind
    for got in ranks:
        if got["counts"] is not None:
            assert got["counts"].tolist() == counts.tolist()
        if got["bias"] is not None:
            moved = _weights(kind)["router.bias"] + 0.1 * torch.sign(
                counts.double().mean() - counts
            )
            assert difference(got["bias"], moved) < FLOAT64_LAYER


def _check_gradients(grid, sp, kind, ranks, grads):
    whole = {n: torch.zeros_like(g) for n, g in grads.items() if g is not None}
    for rank, got in enumerate(ranks):
        for name, place, grad in got["gradients"]:
            if name == "shared_gate.weight" and not sp and grid.coords(rank).tp:
                continue  # every tp rank has seen all tokens
            whole[name][place] += grad
    assert {"router.weight", "experts.up.weight", "experts.down.weight"} <= set(whole)
    for name, grad in whole.items():
        assert difference(grad, grads[name]) < FLOAT64_LAYER, (kind, name)
