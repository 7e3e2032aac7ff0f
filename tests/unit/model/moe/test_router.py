"""Choices of experts: ties, groups, sinkhorn, capacity, and what masked tokens may not touch."""

import pytest
import torch

from raymega.config.moe import MoeSection
from raymega.model.moe import router
from raymega.model.moe.layer import MoeLayer
from raymega.model.moe.load_balancing import add_load, auxiliary_loss, update_expert_bias
from raymega.model.moe.router import Router, apply_capacity, choose, jitter, sinkhorn
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.expert_parallel.token_ids import TokenIds
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.memory.activation_bytes import own_choices
from raymega.plan.memory.activation_shape import activation_shape
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.references import moe as plain
from tests.support.references import plain_models
from tests.unit.model.parts import make_model_factory

NOBODY = alone(0)


def _token_ids(num_tokens, *, uncounted=()):
    is_counted = torch.ones(num_tokens, dtype=torch.bool)
    is_counted[list(uncounted)] = False
    return TokenIds(numbers=torch.arange(num_tokens), is_counted=is_counted, row_length=num_tokens)


def _layer(moe, dtype=torch.float64, *, rounded_to=torch.float64):
    weights = plain.draw_weights(moe, width=12, ffn_hidden_size=8)
    weights = {name: values.to(rounded_to).double() for name, values in weights.items()}
    sp = SequenceParallel(tp=NOBODY)
    groups = ExpertGroups(ep=NOBODY, etp=NOBODY, micro=NOBODY, sp=sp)
    return MoeLayer(plain.Factory(weights, sp, dtype=dtype), "moe", moe, groups)


def test_of_equal_scores_the_lower_expert_is_chosen():
    scores = torch.tensor([[0.2, 0.5, 0.5, 0.2, 0.5], [0.1, 0.1, 0.1, 0.1, 0.1]])
    chosen, gaps = choose(scores, MoeSection(num_experts=5, top_k=2))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert gaps.tolist() == [0.0, 0.0]


def test_margin_is_the_gap_to_the_first_that_was_not_chosen():
    _, gaps = choose(torch.tensor([[0.9, 0.1, 0.6, 0.5]]), MoeSection(num_experts=4, top_k=2))
    assert gaps.item() == pytest.approx(0.1)
    _, gaps = choose(torch.tensor([[0.9, 0.1]]), MoeSection(num_experts=2, top_k=2))
    assert gaps.item() == float("inf")


@pytest.mark.parametrize(("score", "wanted"), [("max", [0, 2]), ("top2", [2, 3])])
def test_experts_come_from_the_best_groups(score, wanted):
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.1, 0.2]])
    moe = MoeSection(num_experts=6, top_k=2, n_group=3, topk_group=1, group_score=score)
    chosen, gaps = choose(scores, moe)
    assert sorted(chosen[0].tolist()) == (wanted if score == "top2" else [0, 1])
    assert gaps.item() == pytest.approx(0.3 if score == "max" else 0.2)


def test_of_equal_groups_the_lower_is_chosen_though_scores_are_negative():
    moe = MoeSection(num_experts=4, top_k=2, n_group=2, topk_group=1)
    assert choose(torch.full((1, 4), -1.0), moe)[0].tolist() == [[0, 1]]


def test_sinkhorn_evens_out_the_load_that_logits_would_pile_up():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 8, generator=generator).double()
    logits[:, 0] += 3
    is_counted = torch.ones(512, dtype=torch.bool)
    offset = sinkhorn(logits, is_counted, NOBODY, rounds=30)
    columns = (logits + offset).softmax(1).sum(0)
    assert torch.allclose(columns, torch.full_like(columns, 64.0), rtol=1e-6)
    load = (logits + offset).argmax(1).bincount(minlength=8)
    assert load.max() < 100 < logits.argmax(1).bincount().max()


def test_sinkhorn_reads_counted_tokens_only():
    logits = torch.randn(16, 4).double()
    token_ids = _token_ids(16, uncounted=range(10, 16))
    others = logits.clone()
    others[10:] = 50 * torch.randn(6, 4)
    first, second = (sinkhorn(x, token_ids.is_counted, NOBODY, rounds=8) for x in (logits, others))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("token_drop_policy", "kept"), [("probability", [1, 3]), ("position", [0, 1])]
)
def test_an_expert_keeps_the_first_in_its_order(token_drop_policy, kept):
    chosen = torch.zeros(5, 1, dtype=torch.int64)
    weights = torch.tensor([[0.1], [0.9], [0.2], [0.9], [0.99]])
    moe = MoeSection(
        num_experts=2, top_k=1, capacity_factor=1.0, token_drop_policy=token_drop_policy
    )
    token_ids = _token_ids(5, uncounted=[4])
    experts, gap = apply_capacity(chosen, weights, token_ids, torch.tensor(2), moe, NOBODY)
    assert [t for t in range(5) if experts[t] == 0] == kept
    assert gap.item() == pytest.approx(0.7 if token_drop_policy == "probability" else torch.inf)
    assert set(experts.flatten().tolist()) == {0, 2}


def test_of_equal_weights_the_earlier_token_stays_wherever_it_lies():
    chosen, weights = torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), 0.5)
    token_ids = TokenIds(
        numbers=torch.tensor([7, 1, 5, 0]), is_counted=torch.ones(4, dtype=torch.bool), row_length=8
    )
    moe = MoeSection(num_experts=1, top_k=1, capacity_factor=1.0)
    experts, gap = apply_capacity(chosen, weights, token_ids, torch.tensor(2), moe, NOBODY)
    assert experts.flatten().tolist() == [1, 0, 1, 0] and gap == 0


@pytest.mark.parametrize(
    ("token_drop_policy", "is_close"), [("probability", True), ("position", False)]
)
def test_a_choice_that_is_barely_kept_is_in_the_margin(token_drop_policy, is_close):
    moe = MoeSection(
        num_experts=2,
        top_k=1,
        capacity_factor=1,
        norm_topk_prob=False,
        token_drop_policy=token_drop_policy,
    )
    layer, token = _layer(moe), torch.randn(12).double()
    scales = torch.tensor(
        [1, 2, 2 + 1e-9, 3], dtype=torch.float64
    )  # one expert, which takes two of them
    layer((scales[:, None, None] * token).requires_grad_()).sum().backward()
    _, margin = layer.router.record.drain(token.device)
    assert margin > 0 and (margin < 1e-8) == is_close


def test_uncounted_tokens_are_in_no_load_and_no_margin():
    chosen = torch.tensor([[0, 1], [0, 2], [0, 3]])
    token_ids = _token_ids(3, uncounted=[1])
    counts = add_load(chosen, token_ids, torch.zeros(4, dtype=torch.float64))
    assert counts.tolist() == [2, 1, 0, 1] and token_ids.num_counted == 2
    moe = MoeSection(num_experts=4)
    layer = _layer(moe)
    x = torch.randn(3, 12).double().requires_grad_()
    with torch.no_grad():
        x[1] = 0.0  # all experts are equal to it
    for uncounted, is_zero in (((), True), ((1,), False)):
        _, routing = layer.router(x, _token_ids(3, uncounted=uncounted))
        routing.weights.sum().backward()
        _, margin = layer.router.record.drain(x.device)
        assert (margin.item() == 0) == is_zero


def test_load_of_the_last_step_is_shared_in_float64_however_many_tokens_it_had():
    moe = MoeSection(num_experts=2, top_k=1, load_balancing_type="global", router_aux_loss_coef=0.5)
    # the sum is no float32 number
    last, scores = torch.tensor([2.0**24, 1.0]), torch.tensor([[1.0, 0.0]]).double()
    chosen = torch.zeros(1, 1, dtype=torch.int64)
    loss = auxiliary_loss(moe, scores, chosen, _token_ids(1), totals=None, last=last, micro=NOBODY)
    assert loss.item() == pytest.approx(2**24 / (2**24 + 1), rel=1e-12)


def test_a_tally_counts_once_though_forward_runs_again():
    layer = _layer(MoeSection(num_experts=4))
    x = torch.randn(6, 2, 12).double().requires_grad_()
    with torch.no_grad():
        layer(x)
    layer(x)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    sums, _ = layer.router.record.drain(x.device)
    assert sums[:4].sum() == 2 * 12 and sums[4] == 12
    assert layer.router.record.drain(x.device)[0].sum() == 0


@pytest.mark.parametrize("frozen", ["router.weight", "experts.up", "all"])
@pytest.mark.parametrize("is_remade", [False, True])
def test_a_tally_counts_once_whatever_is_frozen(frozen, is_remade):
    moe = MoeSection(
        num_experts=4,
        load_balancing_type="micro_batch",
        router_aux_loss_coef=0.1,
        router_z_loss_coef=0.1,
    )
    layer = _layer(moe)
    layer.is_remade = is_remade
    for name, param in layer.named_parameters():
        param.requires_grad_(frozen not in (name, "all"))
    x = torch.randn(6, 2, 12).double().requires_grad_()
    for _ in range(2):
        layer(x).sum().backward()
    sums, margin = layer.router.record.drain(x.device)
    assert sums[:4].sum() == 2 * 2 * 12 and sums[4] == 2 * 12 and sums[5] == 2 * 2 * 12
    assert sums[7:].min() > 0 and margin < torch.inf
    assert sums.dtype == margin.dtype == torch.float64


def test_bias_moves_by_the_sign_of_the_error_alone():
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([10.0, 0.0, 5.0, 5.0]), 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    even = torch.zeros(49)
    update_expert_bias(even, torch.full((49,), 3.0), 0.25)
    assert not even.any()


def test_jitter_is_a_function_of_the_token_and_spread_evenly():
    keys = torch.randint(-(1 << 62), 1 << 62, (400,))
    noise = jitter(keys, 50, 0.2, torch.float64)
    assert noise.min() >= 0.8 and noise.max() <= 1.2
    assert noise.mean().item() == pytest.approx(1.0, abs=3e-3)
    assert noise.std().item() == pytest.approx(0.2 / 3**0.5, rel=0.02)
    assert torch.equal(jitter(keys[7:9], 50, 0.2, torch.float64), noise[7:9])


def test_evaluation_neither_jitters_nor_evens_out():
    moe = MoeSection(num_experts=4, load_balancing_type="sinkhorn")
    layer = _layer(moe).eval()
    x, token_ids = torch.randn(6, 12).double(), _token_ids(6)
    _, routing = layer.router(x, token_ids)
    logits = x @ layer.router.weight.T
    assert torch.equal(routing.experts, logits.topk(2).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_formats_come_close_and_route_in_wide_ones(dtype):
    moe = MoeSection(num_experts=4, load_balancing_type="micro_batch", router_aux_loss_coef=0.1)
    x = torch.randn(32, 1, 12)
    wide, narrow = _layer(moe, rounded_to=dtype), _layer(moe, dtype)
    leaf = x.to(dtype).requires_grad_()
    y, wanted = narrow(leaf), wide(x.to(dtype).double())
    y.sum().backward()
    assert y.dtype == dtype and leaf.grad.dtype == dtype
    same = (y.double() - wanted).abs().mean() / wanted.abs().mean()
    assert same < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 8.0, 1e300])
@pytest.mark.parametrize("layout", ["tp1", "tp4", "tp2-cp2", "dp8"])
def test_rows_that_are_reserved_for_experts_are_those_that_the_planner_prices(
    layout, factor, monkeypatch
):
    moe = {"num_experts": 8, "capacity_factor": factor, "pad_expert_input_to_capacity": "true"}
    fields = (f"model.moe.{name}={value}" for name, value in moe.items())
    plan = make_test_plan(*layout_overrides(layout), *fields)
    shape, parallel = activation_shape(plan.job), plan.job.parallel
    ranks = tuple(range(parallel.tp * parallel.cp))
    micro = Group(name="micro", ranks=ranks, index=0, timeout_s=1.0, handle=None)
    monkeypatch.setattr(router, "all_reduce", lambda counts, group: counts * group.size)
    monkeypatch.setattr(
        router, "apply_capacity", lambda chosen, *_: (chosen, torch.tensor(torch.inf))
    )
    section = shape.model.moe
    weights = plain.draw_weights(section, width=12, ffn_hidden_size=8)
    one = Router(plain.Factory(weights, SequenceParallel(tp=NOBODY)), "moe.router", section, micro)
    num_tokens = shape.tokens // parallel.tp
    _, routing = one(torch.randn(num_tokens, 12).double(), _token_ids(num_tokens))
    assert 8 * routing.capacity == own_choices(shape)


def test_each_layer_has_a_jitter_of_its_own():
    moe = MoeSection(num_experts=4, router_jitter_noise=0.2)
    factory = make_model_factory(plain_models.make_model("llama", moe=moe))
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).double()
    weight = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)).double()

    def logits(layer):
        router = Router(factory, f"layers.{layer}.moe.router", moe, NOBODY)
        router.weight.data.copy_(weight)
        return router._logits(x, torch.arange(64) * 1_000_003)

    first, again, second = map(logits, (0, 0, 1))
    assert torch.equal(first, again) and not torch.isclose(first, second).all(1).any()
