"""A pipelined step over gloo equals the unpipelined one, for any schedule and micro-batch count."""

import functools

import pytest
import torch

from raymega.errors import CommunicationError
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.grid import Grid
from raymega.schedule.checker import check
from raymega.schedule.instructions import backward_pass
from raymega.schedule.table import make_forward_only, make_schedule
from tests.support.ranks import run_grid
from tests.support.tolerances import FLOAT64_LAYER

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("pp", [2, 4], ids=lambda pp: f"pp{pp}")

S, B, D = 3, 2, 5
COUNTS = (1, 2, 3, 5, 8)
NAMES = ("1f1b", "gpipe", "backwards_reversed", "forward_only")
SHORT_S = 3.0


def _weight(stage):
    generator = torch.Generator().manual_seed(stage)
    weight = torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5
    return weight.requires_grad_()


def _batches(m):
    generator = torch.Generator().manual_seed(100 + m)
    return list(torch.randn(m, S, B, D, generator=generator, dtype=torch.float64))


def _layer(weight, x):
    return torch.tanh(x @ weight)


def _lists(name, pp, m):
    if name == "forward_only":
        return make_forward_only(pp=pp, num_micro_batches=m)
    if name != "backwards_reversed":
        return make_schedule(name, pp=pp, num_micro_batches=m)
    # No schedule of ours, but a legal one: the executor has to obey the list, not a habit.
    lists = make_forward_only(pp=pp, num_micro_batches=m)
    last_first = range(m - 1, -1, -1)
    return tuple(
        sum((backward_pass(pp=pp, stage=s, micro_batch=i) for i in last_first), start=lists[s])
        for s in range(pp)
    )


def _p2p(env, timeout_s=SHORT_S * 10):
    return PointToPoint(
        env.groups,
        shape=(S, B, D),
        dtype=torch.float64,
        device=env.device,
        timeout_s=timeout_s,
    )


def _stage_fn(env, weight):
    stage, is_last = env.coords.pp, env.coords.pp == env.grid.pp - 1

    def run(batch, hidden):
        assert (hidden is None) == (stage == 0)
        output = _layer(weight, batch if hidden is None else hidden)
        return output.square().sum() if is_last else output

    return run


def _run_steps(env, cases):
    """(loss sum, weight gradient) of each case, all over the same transfers."""
    p2p, results = _p2p(env), []
    for name, m in cases:
        weight = _weight(env.coords.pp)
        schedule = _lists(name, env.grid.pp, m)[env.coords.pp]
        output = Executor(schedule, _stage_fn(env, weight), p2p).run(_batches(m), is_recording=True)
        assert [event.name for event in output.events] == [i.op for i in schedule]
        results.append((output.loss_sum, weight.grad))
    return results


@functools.cache
def _wanted(pp, m):
    weights = [_weight(stage) for stage in range(pp)]
    x = functools.reduce(lambda x, w: _layer(w, x), weights, torch.stack(_batches(m)))
    loss = x.square().sum()
    loss.backward()
    return loss.detach(), [weight.grad for weight in weights]


@degrees
def test_loss_and_every_gradient_equal_the_unpipelined_step(pp):
    cases = [(name, m) for name in NAMES for m in COUNTS]
    for name, m in cases:
        check(_lists(name, pp, m), num_micro_batches=m, is_forward_only=name == "forward_only")
    results = run_grid(_run_steps, Grid(pp=pp), cases)
    for case, (name, m) in enumerate(cases):
        loss, grads = _wanted(pp, m)
        losses, mine = zip(*(rank[case] for rank in results), strict=True)
        assert all(value == 0 for value in losses[:-1])
        torch.testing.assert_close(losses[-1], loss, rtol=FLOAT64_LAYER, atol=0)
        if name == "forward_only":
            assert all(grad is None for grad in mine)
            continue
        for grad, wanted in zip(mine, grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=0, atol=FLOAT64_LAYER)


def _fail_on_the_last(env):
    """Stage 1 hands back the gradient of micro-batch 0, fails at 1 and ends."""
    batches, work = _batches(2), _stage_fn(env, _weight(env.coords.pp))

    def stage_fn(batch, hidden):
        if env.coords.pp == 1 and batch is batches[1]:
            raise ZeroDivisionError("planted")
        return work(batch, hidden)

    p2p = _p2p(env, SHORT_S)
    executor = Executor(_lists("1f1b", 2, 2)[env.coords.pp], stage_fn, p2p)
    try:
        executor.run(batches, is_recording=False)
    except CommunicationError as error:
        return str(error), error.__notes__
    except ZeroDivisionError as error:
        p2p.wait_all()
        return str(error), error.__notes__
    return None


def test_failure_names_stage_micro_batch_and_peer():
    upper, lower = run_grid(_fail_on_the_last, Grid(pp=2))
    assert lower == ("planted", ["on pipeline stage 1, at forward 1"])
    message, notes = upper
    assert "stage 0, receiving the gradient of micro-batch 1 from stage 1" in message
    assert notes == ["on pipeline stage 0, at recv_backward 1"]


def _send_what_nobody_asks_for(env):
    """Stage 0 sends micro-batch 3 while stage 1 waits for 7; both must give up and say so."""
    tensor = torch.zeros(S, B, D, dtype=torch.float64)
    p2p = _p2p(env, SHORT_S)
    try:
        if env.coords.pp == 0:
            p2p.post_send_forward(tensor, 3)
            p2p.wait_all()
        else:
            p2p.recv_forward(7)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_send_that_is_never_taken_fails_at_the_end_of_the_step():
    upper, lower = run_grid(_send_what_nobody_asks_for, Grid(pp=2))
    assert "stage 0, sending the activation of micro-batch 3 to stage 1" in upper
    assert "stage 1, receiving the activation of micro-batch 7 from stage 0" in lower
