"""The executor on one stage: the same code as any pipeline, with nobody to talk to."""

import functools
import gc
import itertools
import weakref

import pytest
import torch

from raymega.errors import InternalError
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.pipeline.executor import Executor
from raymega.schedule.instructions import Op
from raymega.schedule.order import Sizes
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_forward_only, make_schedule
from tests.unit.pipeline.conftest import make_p2p

M, B, D = 4, 2, 3


def _schedule(name):
    if name == "forward_only":
        return make_forward_only(Placement(pp=1), M).lists[0]
    return make_schedule(name, Sizes(pp=1, num_micro_batches=M)).lists[0]


@pytest.fixture
def weight():
    return torch.linspace(-1, 1, D, dtype=torch.float64).requires_grad_()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(M, B, D, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_one_stage_gives_the_sum_of_losses_and_its_gradient(name, weight, batches, alone):
    executor = Executor(_schedule(name), [lambda x, _: (x * weight).tanh().sum()], alone)
    output = executor.run(batches, is_recording=False)
    mine, weight.grad = weight.grad, None
    whole = (torch.stack(batches) * weight).tanh().sum()
    whole.backward()
    assert output.loss_sum.item() == pytest.approx(whole.item(), rel=1e-12)
    assert not output.loss_sum.requires_grad and output.events == ()
    torch.testing.assert_close(mine, weight.grad, rtol=1e-12, atol=0)


def test_forward_only_builds_no_graph(weight, batches, alone):
    outputs = []

    def stage(x, _):
        outputs.append((x * weight).sum())
        return outputs[-1]

    total = Executor(_schedule("forward_only"), [stage], alone).run(batches, is_recording=False)
    assert not any(output.requires_grad for output in outputs)
    assert total.loss_sum.item() == pytest.approx(sum(outputs).item())


@pytest.mark.parametrize(("name", "peak"), [("1f1b", 1), ("gpipe", M), ("forward_only", 1)])
def test_micro_batches_are_let_go_when_they_are_done(name, peak, weight, batches, alone):
    alive, peaks = weakref.WeakSet(), []

    def stage(x, _):
        gc.collect()
        output = (x * weight).sum()
        alive.add(output)
        peaks.append(len(alive))
        return output

    Executor(_schedule(name), [stage], alone).run(batches, is_recording=False)
    assert max(peaks) == peak


@pytest.mark.parametrize("name", ["1f1b", "forward_only"])
def test_every_instruction_is_a_sign_of_life(name, weight, batches, alone):
    schedule, pulses = _schedule(name), []
    stages = [lambda x, _: (x * weight).sum()]
    executor = Executor(schedule, stages, alone, progress=lambda: pulses.append(1))
    executor.run(batches, is_recording=False)
    assert len(pulses) == len(schedule)


def test_recorded_events_are_the_schedule_in_seconds_since_the_start(weight, batches, alone):
    ticks = itertools.count(100)
    executor = Executor(
        _schedule("1f1b"), [lambda x, _: (x * weight).sum()], alone, clock=lambda: next(ticks)
    )
    events = executor.run(batches, is_recording=True).events
    assert events[:3] == (
        ("forward", 0, 0, 1, 2),
        ("backward", 0, 0, 3, 4),
        ("forward", 1, 0, 5, 6),
    )
    assert len(events) == 2 * M


def test_loss_of_a_low_precision_stage_is_summed_in_its_own_wider_dtype(batches, alone):
    alone.dtype = torch.bfloat16
    executor = Executor(_schedule("forward_only"), [lambda _x, _: torch.tensor(0.1)], alone)
    assert executor.run(batches, is_recording=False).loss_sum.dtype == torch.float32


def test_error_of_the_stage_keeps_its_type_and_says_where(batches, alone):
    def stage(x, _):
        if x is batches[2]:
            raise ZeroDivisionError("division by zero")
        return x.sum().requires_grad_()

    with pytest.raises(ZeroDivisionError) as caught:
        Executor(_schedule("1f1b"), [stage], alone).run(batches, is_recording=False)
    assert caught.value.__notes__ == ["on pipeline stage 0, at forward 2"]


def test_wrong_number_of_micro_batches_is_refused_before_any_work(batches, alone):
    def stage(*_):
        pytest.fail("the stage was called")

    with pytest.raises(InternalError, match="3 micro-batches"):
        Executor(_schedule("1f1b"), [stage], alone).run(batches[:3], is_recording=False)


def test_sends_are_waited_for_after_the_last_instruction(weight, batches, alone, monkeypatch):
    order = []
    monkeypatch.setattr(alone, "wait_all", lambda: order.append("waited"))

    def stage(x, _):
        order.append("worked")
        return (x * weight).sum()

    Executor(_schedule("forward_only"), [stage], alone).run(batches, is_recording=False)
    assert order == ["worked"] * M + ["waited"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_chunks_of_one_rank_hand_over_to_each_other(name, batches):
    """x -> tanh(x * w0) -> * w1 -> sum on three chunks, without any communicator."""
    weights = [torch.linspace(1, 2 + i, D, dtype=torch.float64).requires_grad_() for i in range(2)]
    stages = [
        lambda x, _: (x[None] * weights[0]).tanh(),
        lambda _, hidden: hidden * weights[1],
        lambda _, hidden: hidden.square().sum(),
    ]
    program = make_schedule(name, Sizes(pp=1, num_micro_batches=M, chunks=3))
    executor = Executor(program.lists[0], stages, make_p2p(program.placement, 0))
    complete = []
    output = executor.run(batches, is_recording=False, before_last_backward=complete.append)
    mine = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    whole = ((torch.stack(batches) * weights[0]).tanh() * weights[1]).square().sum()
    whole.backward()
    assert output.loss_sum.item() == pytest.approx(whole.item(), rel=1e-12)
    for grad, weight in zip(mine, weights, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-12, atol=0)
    assert complete == [2, 1, 0]


def test_last_backward_of_each_chunk_is_announced_before_it(batches):
    """So a bucket may leave as soon as that backward has filled it."""
    program = make_schedule("interleaved", Sizes(pp=1, num_micro_batches=M, chunks=2))
    ticks, told = itertools.count(), []
    executor = Executor(
        program.lists[0],
        [lambda x, _: x[None].requires_grad_() * 1, lambda _, hidden: hidden.sum()],
        make_p2p(program.placement, 0),
        clock=lambda: next(ticks),
    )
    events = executor.run(
        batches,
        is_recording=True,
        before_last_backward=lambda chunk: told.append((chunk, next(ticks))),
    ).events
    for chunk, time in told:
        last = [event for event in events if event.name == Op.BACKWARD and event.chunk == chunk][-1]
        assert last.start_s < time < last.end_s + 1 and last.micro_batch == M - 1
    assert [chunk for chunk, _ in told] == [1, 0]


def test_layers_know_in_forward_whether_their_gradients_will_be_put_off(batches):
    """Of zb_v's micro-batches all, of dualpipe_v's some, of 1f1b's none."""
    told = {}
    for name, chunks in (("zb_v", 2), ("dualpipe_v", 2), ("1f1b", 1)):
        program = make_schedule(name, Sizes(pp=1, num_micro_batches=M, chunks=chunks))
        deferrals = [WeightGradQueue() for _ in range(chunks)]
        told[name] = []

        def stage(x, hidden, *, grad_queue, told=told[name], last=False):
            told.append(grad_queue.stays_closed)
            x = x[None].requires_grad_() if hidden is None else hidden
            return x.sum() if last else x * 1

        stages = [
            functools.partial(stage, grad_queue=grad_queue, last=chunk == chunks - 1)
            for chunk, grad_queue in enumerate(deferrals)
        ]
        executor = Executor(
            program.lists[0], stages, make_p2p(program.placement, 0), deferrals=deferrals
        )
        executor.run(batches, is_recording=False)
        cut = {(i.micro_batch, i.chunk) for i in program.lists[0] if i.op == Op.BACKWARD_INPUT}
        forwards = [i for i in program.lists[0] if i.op == Op.FORWARD]
        assert told[name] == [(i.micro_batch, i.chunk) not in cut for i in forwards]
    assert not any(told["zb_v"]) and all(told["1f1b"]) and len(set(told["dualpipe_v"])) == 2
