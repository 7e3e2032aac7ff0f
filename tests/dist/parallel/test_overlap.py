"""A recorded step shows each bucket's collective, and that work goes on beside it."""

from itertools import pairwise

import pytest
import torch

from raymega.messages import Requests
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements
from raymega.plan.run_plan import read_plan
from raymega.planner.cost.context_cost import shape_cost
from raymega.schedule.timeline import BETWEEN_CP, BETWEEN_EXPERTS, IN_UPDATE, overlap
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.traffic import exchanged_bytes

pytestmark = pytest.mark.dist


def _steps(env, plan_json):
    """Events of two steps, the second of which gathers what the first has updated."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, events = TrainState(), []
    for _ in range(2):
        outcome = train_step(parts, state, Requests(), is_recording=True)
        state = outcome.state
        events.append(outcome.events)
    buckets = [(b.index, b.is_partial_over_tp, b.is_tied) for b in parts.optimizer._table.buckets]
    return events, buckets, parts.comm_log.pause((), began_s=0.0)


def _of(events, name):
    return {event.micro_batch: event for event in events if event.name == name}


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
@pytest.mark.parametrize("layout", ["pp2-dp2", "tp2-dp2-sp", "tp2-pp2-dp2-sp"])
def test_buckets_leave_during_the_last_backward_and_only_then(layout, sharding):
    """Partial ones go over tp meanwhile, and over dp when the next one leaves, or at the end."""
    overrides = [*layout_overrides(layout), f"parallel.sharding={sharding}"]
    plan = make_test_plan(*overrides, "model.num_kv_heads=1")
    for steps, buckets, rest in run_grid(_steps, plan.grid, plan.to_json()):
        assert rest == () and len(buckets) >= 4
        for events in steps:
            backwards = [e for e in events if e.name == "backward"]
            last = max(backwards, key=lambda event: event.end_s)
            reduces, waits = _of(events, "reduce"), _of(events, "wait_reduce")
            over_tp = _of(events, "sum_partial")
            assert reduces.keys() == waits.keys() == {index for index, *_ in buckets}
            assert over_tp.keys() == {index for index, is_partial, _ in buckets if is_partial}
            assert bool(over_tp) == ("sp" in layout)
            leaving = [(over_tp.get(i) or reduces[i]).start_s for i, *_ in buckets]
            assert all(last.start_s < start_s < last.end_s for start_s in leaving)
            late = [index for index, e in reduces.items() if e.start_s > last.end_s]
            assert len(late) <= 1 and set(late) <= over_tp.keys()
            for index, _, is_tied in buckets:
                assert is_tied == (index in _of(events, "sum_tied"))
                assert waits[index].start_s >= last.end_s >= last.start_s
            assert 0 <= overlap([events]).hidden_share <= 1


def test_weights_are_gathered_in_the_order_of_use_and_awaited_in_the_first_forward():
    plan = make_test_plan(*layout_overrides("pp2-dp2"), "parallel.sharding=optimizer")
    for steps, buckets, _ in run_grid(_steps, plan.grid, plan.to_json()):
        first, second = steps
        assert _of(first, "gather") == {}
        gathers, waits = _of(second, "gather"), _of(second, "wait_gather")
        assert gathers.keys() == waits.keys() == {index for index, *_ in buckets}
        forward = min((e for e in second if e.name == "forward"), key=lambda e: e.start_s)
        assert all(gather.start_s < forward.start_s for gather in gathers.values())
        inside = [forward.start_s <= w.start_s <= w.end_s <= forward.end_s for w in waits.values()]
        assert all(inside)
        launched = sorted(gathers, key=lambda index: gathers[index].start_s)
        assert launched == sorted(waits, key=lambda index: waits[index].start_s)


def _step_between_cp(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=True)
    return outcome.events, parts.comm_log.sent_bytes(BETWEEN_CP)


METHODS = {
    "ring": {"cp_pass"},
    "all_gather": {"cp_gather", "cp_reduce"},
    "all_to_all": {"cp_exchange"},
    "hybrid": {"cp_exchange", "cp_pass"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_transfers_between_cp_ranks_are_recorded_and_their_bytes_are_what_the_formula_says(method):
    """Each is waited for once, inside the work of a layer."""
    plan = make_test_plan(*layout_overrides("cp4"), f"parallel.cp_method={method}")
    cost = shape_cost(activation_shape(plan.job), method)
    layers = plan.job.model.num_layers * plan.batch.num_micro_batches
    inner = inner_ranks(plan.job.parallel)
    results = run_grid(_step_between_cp, plan.grid, plan.to_json(), hierarchical_cp_size=inner)
    for events, sent in results:
        assert sent == (cost.inner_bytes + cost.outer_bytes) * layers
        names = {event.name for event in events} & BETWEEN_CP
        assert names == METHODS[method]
        work = [event for event in events if event.name in ("forward", "backward")]
        for name in names:
            launched, waits = _of(events, name), _of(events, f"wait_{name}")
            assert launched.keys() == waits.keys() == set(range(len(waits)))
            for number, wait in waits.items():
                assert launched[number].start_s <= wait.start_s <= wait.end_s
                assert any(w.start_s <= wait.start_s <= wait.end_s <= w.end_s for w in work)
        assert 0 <= overlap([events], BETWEEN_CP).hidden_share <= 1


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather"])
def test_transfers_between_experts_are_recorded_and_counted(dispatch):
    """What all ranks send is what they say; each transfer is waited for once, inside a layer's work."""
    plan = make_test_plan(
        *layout_overrides("dp4-ep2-etp2"), "model.moe.num_experts=4", "model.num_layers=2",
        f"parallel.moe_token_dispatcher_type={dispatch}",
    )  # fmt: skip
    kinds = {"ep_exchange"} if dispatch == "all_to_all" else {"ep_gather", "ep_reduce"}
    kinds |= {"etp_gather", "etp_reduce"}
    for events, sent in run_grid(_step_between_experts, plan.grid, plan.to_json()):
        names = {event.name for event in events} & BETWEEN_EXPERTS
        assert names == kinds and sent.keys() == kinds and min(sent.values()) > 0
        work = [event for event in events if event.name in ("forward", "backward")]
        for name in names:
            launched, waits = _of(events, name), _of(events, f"wait_{name}")
            assert launched.keys() == waits.keys() == set(range(len(waits)))
            for number, wait in waits.items():
                assert launched[number].start_s <= wait.start_s <= wait.end_s
                assert any(w.start_s <= wait.start_s <= wait.end_s <= w.end_s for w in work)
    if dispatch == "all_gather":
        rows = plan.job.data.seq_len * plan.batch.micro_batch_size * plan.job.model.hidden_size * 8
        layers = plan.job.model.num_layers * plan.batch.num_micro_batches
        # Of etp's two ranks each sends its tokens to the other; of ep's each those of both.
        assert sent["etp_gather"] == 2 * rows * layers and sent["ep_gather"] == 4 * rows * layers


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_tokens_travel_beside_the_work_of_another_micro_batch(is_overlapped):
    """With turns a transfer is waited for when the other pass has launched one; alone, before."""
    plan = make_test_plan(
        *layout_overrides("dp2-ep2"), "model.moe.num_experts=4", "model.num_layers=2",
        "data.global_batch_size=8", f"parallel.overlap_moe_expert_parallel_comm={str(is_overlapped).lower()}",
    )  # fmt: skip
    found = run_grid(_step_between_experts, plan.grid, plan.to_json())
    for events, _ in found:
        launched, waits = _of(events, "ep_exchange"), _of(events, "wait_ep_exchange")
        late = [
            n for n in waits if n + 1 in launched and waits[n].start_s > launched[n + 1].start_s
        ]
        assert bool(late) == is_overlapped
        passes = [event for event in events if event.name in ("forward", "backward")]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(passes))
    assert len(_of(found[0][0], "ep_exchange")) == 4 * 2 * plan.batch.num_micro_batches


def _step_between_experts(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=True)
    sent = {name: parts.comm_log.sent_bytes([name]) for name in BETWEEN_EXPERTS}
    return outcome.events, {name: count for name, count in sent.items() if count}


def _after_update(env, plan_json):
    """A step and a save, while the weights are on their way; then the weights."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    train_step(parts, TrainState(), Requests(), is_recording=False)
    under_way = set(parts.weights._under_way)
    saved = [block.values.clone() for block in parts.optimizer.blocks()]
    parts.weights.wait_for_all()
    same = all(
        torch.equal(a, block.values)
        for a, block in zip(saved, parts.optimizer.blocks(), strict=True)
    )
    buckets = {bucket.index for bucket in parts.optimizer._table.buckets}
    return under_way == buckets, same, [flat.clone() for flat in parts.weights._flats]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gather_starts_with_the_update_and_disturbs_no_save(dtype):
    overrides = ["parallel.sharding=optimizer", f"precision.dtype={dtype}"]
    plan = make_test_plan(*layout_overrides("pp2-dp2"), *overrides)
    results = run_grid(_after_update, plan.grid, plan.to_json())
    for rank, (is_under_way, is_undisturbed, weights) in enumerate(results):
        assert is_under_way and is_undisturbed
        first = results[plan.grid.group("dp", rank)[0]][2]
        assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))


def _evaluated(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    train_step(parts, TrainState(), Requests(), is_recording=False)
    losses = [evaluate(parts)["eval/loss"] for _ in range(2)]
    return losses, [flat.clone() for flat in parts.weights._flats]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp2", "pp2-dp3"])
def test_evaluation_after_a_step_sees_the_updated_weights(layout):
    overrides = [*layout_overrides(layout), "run.eval_samples=6"]
    losses = {}
    for sharding in ("none", "optimizer"):
        plan = make_test_plan(*overrides, f"parallel.sharding={sharding}")
        results = run_grid(_evaluated, plan.grid, plan.to_json())
        losses[sharding] = results[0][0]
        for rank, (mine, weights) in enumerate(results):
            assert mine == losses[sharding]
            peers = plan.grid.group("dp", rank)
            first = results[peers[0]][1]
            assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))
    assert losses["none"] == losses["optimizer"]


def _step_with_update(env, plan_json):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=True)
    sent = {name: parts.comm_log.sent_bytes([name]) for name in IN_UPDATE}
    again = train_step(parts, outcome.state, Requests(), is_recording=False)
    return outcome.events, sent, again.events


@pytest.mark.sample(1)
@pytest.mark.parametrize(("sharding", "limit"), [("none", 0.03), ("optimizer", 0.1)])
def test_what_an_update_exchanges_is_recorded_and_what_the_planner_says(sharding, limit):
    """After all work of the step; owners of matrices differ, so bytes are the mean over ranks.

    What an owner holds itself of its matrices is its even share where all hold all, and chance where
    the state is shared out.
    """
    plan = make_test_plan(
        *layout_overrides("tp2-dp2"), "model.num_layers=2", "model.num_kv_heads=num_heads",
        "optimizer.name=muon", "optimizer.state_dtype=8bit", f"parallel.sharding={sharding}",
    )  # fmt: skip
    results = run_grid(_step_with_update, plan.grid, plan.to_json())
    for events, sent, again in results:
        names = {event.name for event in events} & IN_UPDATE
        assert names == IN_UPDATE and all(sent.values()) and not again
        end = max(event.end_s for event in events if event.name in ("forward", "backward"))
        for name in names:
            launched, waits = _of(events, name), _of(events, f"wait_{name}")
            assert launched.keys() == waits.keys() == set(range(len(waits)))
            assert all(end <= launched[n].start_s <= w.start_s <= w.end_s for n, w in waits.items())
    held = rank_elements(plan.job, plan.stages_of(0), plan.grid)
    mean = sum(sent["matrix_exchange"] for _, sent, _ in results) / len(results)
    assert mean == pytest.approx(exchanged_bytes(plan.job, held, plan.grid), rel=limit)
