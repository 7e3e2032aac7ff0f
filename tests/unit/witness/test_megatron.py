"""Megatron-core as a witness: routing, its losses, capacity, bias, learning rates and the loss scale.

Its functions on this machine's CPU, in float64 where they allow it; it is no dependency, and skipped where it is not
installed: ``pip install --no-deps megatron-core==0.16.1``.
"""

import warnings
from math import log
from types import SimpleNamespace

import pytest
import torch

from raymega.config.moe import MoeSection
from raymega.config.schema import OptimizerSection, PrecisionSection
from raymega.data.rows import Row, later_of
from raymega.model.moe.load_balancing import auxiliary_loss, update_expert_bias, z_loss
from raymega.model.moe.router import apply_capacity, choose, sinkhorn
from raymega.optim.loss_scale import LossScale, next_loss_scale
from raymega.optim.lr_schedule import learning_rate
from raymega.parallel.comm.process_groups import alone
from raymega.parallel.expert_parallel.token_ids import TokenIds
from raymega.plan.expert_capacity import capacity_share

pytestmark = pytest.mark.wide
T, E, K = 48, 8, 2
NOBODY = alone(0)


@pytest.fixture(scope="module")
def core():
    """Modules of megatron-core, which warns of what it would like to have beside it."""
    why = "megatron-core is not installed: pip install --no-deps megatron-core==0.16.1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", reason=why)
        pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason=why)
        from megatron.core import optimizer_param_scheduler, packed_seq_params, parallel_state
        from megatron.core.optimizer import grad_scaler
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.moe import moe_utils
    return SimpleNamespace(
        moe=moe_utils, lr=optimizer_param_scheduler, scaler=grad_scaler, mtp=multi_token_prediction,
        packed=packed_seq_params, state=parallel_state,
    )  # fmt: skip


def _logits(seed=0):
    return 2 * torch.randn(T, E, generator=torch.Generator().manual_seed(seed)).double()


def _token_ids(counted):
    return TokenIds(numbers=torch.arange(T), is_counted=counted, row_length=T)


def _moe(**fields):
    return MoeSection(num_experts=E, top_k=K, **fields)


def _map_of(chosen):
    return torch.zeros(T, E + 1, dtype=torch.bool).scatter_(1, chosen, value=True)[:, :E]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_balancing_loss_of_a_micro_batch(core, function):
    moe = _moe(
        router_score_function=function, load_balancing_type="micro_batch", router_aux_loss_coef=0.3
    )
    counted = torch.arange(T) % 5 > 0
    routing, scores = core.moe.compute_routing_scores_for_aux_loss(
        _logits(), K, function, padding_mask=~counted
    )
    # theirs is a mean over tokens, ours a sum that the step divides
    num = int(counted.sum())
    wanted = num * core.moe.switch_load_balancing_loss_func(
        scores.double(), routing.sum(0), num, K, E, 0.3
    )
    plain = _logits().softmax(1) if function == "softmax" else _logits().sigmoid()
    chosen, _ = choose(plain, moe)
    totals = torch.cat((_map_of(chosen)[counted].sum(0).double(), torch.tensor([num]).double()))
    found = auxiliary_loss(
        moe, plain, chosen, _token_ids(counted), totals=totals, last=None, micro=NOBODY
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # their softmax is in float32


def test_z_loss(core):
    counted = torch.arange(T) % 7 > 0
    wanted = counted.sum() * core.moe.z_loss_func(_logits(), 0.2, padding_mask=~counted)
    found = z_loss(_moe(router_z_loss_coef=0.2), _logits(), _token_ids(counted))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


def test_sinkhorn_has_their_weights_of_experts_and_their_choices(core):
    logits = _logits()
    normed = core.moe.sinkhorn(logits, tol=1e-6)  # it adds 1e-8, so that less is never reached
    offset = sinkhorn(logits, torch.ones(T, dtype=torch.bool), NOBODY, rounds=200)
    # d1 * exp(logits) * d0: what is left after a row's own factor is the expert's weight
    theirs = (normed.log() - logits).sub_((normed.log() - logits).mean(1, keepdim=True))
    torch.testing.assert_close(theirs, offset.expand(T, E), rtol=0, atol=1e-4)
    chosen, _ = choose(logits + offset, _moe())
    assert torch.equal(_map_of(chosen), _map_of(normed.topk(K, dim=1).indices))


@pytest.mark.parametrize(("policy", "theirs"), [("probability", "probs"), ("position", "position")])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_capacity_drops_the_same_choices(core, policy, theirs, factor):
    moe = _moe(capacity_factor=factor, token_drop_policy=policy)
    logits = _logits()
    logits[:, 0] += 2
    probs, routing = core.moe.topk_routing_with_score_function(logits, K, use_pre_softmax=True)
    capacity = core.moe.get_capacity(T * K, E, factor)
    assert capacity == (torch.tensor(T).double() * capacity_share(moe)).ceil()
    _, kept = core.moe.apply_router_token_dropping(probs, routing, K, factor, drop_policy=theirs)
    chosen, _ = choose(logits.softmax(1), moe)
    assert torch.equal(_map_of(chosen), routing)
    weights = probs.gather(1, chosen)
    counted = torch.ones(T, dtype=torch.bool)
    experts, _ = apply_capacity(
        chosen, weights, _token_ids(counted), torch.tensor(capacity), moe, NOBODY
    )
    if policy == "position":
        # their topk of equal numbers promises no order, so only how many each expert keeps
        assert torch.equal(_map_of(experts).sum(0), kept.sum(0))
    else:
        assert torch.equal(_map_of(experts), kept)
    assert kept.sum() < routing.sum()


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_groups_and_bias_choose_the_same_experts_with_the_same_weights(core, function):
    bias = 0.3 * torch.randn(E, generator=torch.Generator().manual_seed(5)).double()
    is_sigmoid = function == "sigmoid"
    probs, routing = core.moe.topk_routing_with_score_function(
        _logits(), K, use_pre_softmax=True, num_groups=4, group_topk=1, scaling_factor=2.5,
        score_function=function, expert_bias=bias if is_sigmoid else None,
    )  # fmt: skip
    moe = _moe(
        n_group=4, topk_group=1, group_score="top2", routed_scaling_factor=2.5,
        router_score_function=function, norm_topk_prob=is_sigmoid,
    )  # fmt: skip
    scores = _logits().sigmoid() if is_sigmoid else _logits().softmax(1)
    chosen, _ = choose(scores + bias if is_sigmoid else scores, moe)
    assert torch.equal(_map_of(chosen), routing)
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True) if is_sigmoid else weights
    torch.testing.assert_close(probs.gather(1, chosen), 2.5 * weights, rtol=1e-6, atol=0)


def test_bias_moves_alike(core, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_args, **_options: None)
    monkeypatch.setattr(
        core.state, "get_tensor_and_data_parallel_group", lambda **_options: None
    )  # fmt: skip
    loads = torch.tensor([10.0, 0.0, 6.0, 7.0, 6.0, 6.0, 6.0, 7.0])
    assert loads.mean() == 6
    bias = torch.linspace(-1, 1, E)
    wanted = core.moe.get_updated_expert_bias(loads, bias, 0.125)
    update_expert_bias(bias, loads, 0.125)
    assert torch.equal(bias, wanted)


STYLES = {
    "cosine": "cosine", "linear": "linear", "inverse_sqrt": "inverse-square-root", "wsd": "WSD",
    "constant": "constant",
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("warmup", [1, 10])
def test_learning_rates(core, name, warmup):
    """Update n has their rate after n steps: their first update has that of 0 steps."""
    cooldown = {"lr_cooldown_steps": 20} if name == "wsd" else {}
    section = OptimizerSection(
        lr=2.0,
        min_lr_ratio=0.1,
        lr_schedule=name,
        lr_warmup_steps=warmup,
        lr_decay_steps=80,
        **cooldown,
    )
    theirs = core.lr.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]), 0.0, 2.0, 0.2, warmup, 80, STYLES[name], 0.0, 0.0, 80,
        "constant", wsd_decay_steps=20, lr_wsd_decay_style="linear",
    )  # fmt: skip
    # after the last decaying update theirs falls to the minimum, of an inverse square root too
    for number in range(1, 81 if name == "inverse_sqrt" else 120):
        theirs.num_steps = number
        found = learning_rate(section, total_steps=120, step=number - 1)
        assert found == pytest.approx(theirs.get_lr({}), rel=1e-12), number


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_loss_scale(core, hysteresis):
    """Steps of a long run at random, with overflows in bursts."""
    section = PrecisionSection(
        dtype="float16", loss_scale=2.0**16, loss_scale_window=5, loss_scale_hysteresis=hysteresis,
        min_loss_scale=2.0**-40,
    )  # fmt: skip
    theirs = object.__new__(core.scaler.DynamicGradScaler)  # its own beginning asks for CUDA
    vars(theirs).update(
        _scale=torch.tensor([2.0**16]), min_scale=torch.tensor([2.0**-40]), growth_factor=2.0,
        backoff_factor=0.5, growth_interval=5, hysteresis=hysteresis, _growth_tracker=0,
        _hysteresis_tracker=hysteresis,
    )  # fmt: skip
    scale = LossScale(factor=2.0**16)
    draws = torch.rand(400, generator=torch.Generator().manual_seed(hysteresis)).tolist()
    for number, draw in enumerate(draws):
        is_overflow = draw < (0.5 if number // 20 % 3 == 0 else 0.05)
        theirs.update(is_overflow)
        scale = next_loss_scale(scale, section, is_overflow=is_overflow)
        assert scale.factor == theirs._scale.item(), number
    assert abs(log(scale.factor / 2**16, 2)) > 1


@pytest.mark.parametrize("documents", [(12,), (5, 4, 3), (1, 10, 1)], ids=str)
def test_labels_further_ahead_stay_in_their_document(core, documents):
    """Their labels and masks of packed rows, rolled on once a depth within each document."""
    labels = torch.arange(100, 112)
    mask = torch.ones(12)
    ends = torch.tensor((0, *documents)).cumsum(0)
    params = core.packed.PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends
    )
    row = Row(
        tokens=labels.numpy() - 1,
        labels=labels.numpy(),
        mask=mask.bool().numpy(),
        documents=documents,
    )
    found, masks = later_of(row, 3)
    rolled, seen = labels[None].clone(), mask[None].clone()
    for depth in range(3):
        rolled, _ = core.mtp.roll_tensor(rolled, packed_seq_params=params)
        seen, _ = core.mtp.roll_tensor(seen, packed_seq_params=params)
        counts = torch.from_numpy(masks[depth])
        assert torch.equal(counts, seen[0] > 0)
        assert torch.equal(torch.from_numpy(found[depth])[counts], rolled[0][counts])
