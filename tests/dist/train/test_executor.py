"""A pipelined step over gloo equals the unpipelined one, for any schedule and micro-batch count."""

import functools
import os
import re
import signal
import time

import pytest
import torch

from raymega.errors import CommunicationError
from raymega.orchestrate.workers.thread_status import process_state
from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.grid import Grid
from raymega.schedule.checker import check
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.order import Sizes
from raymega.schedule.posting import receive_posts
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_forward_only, make_schedule
from raymega.schedule.transfers import make_program
from tests.support.ranks import ENDLESS_S, RankFailureError, run_grid
from tests.support.tolerances import FLOAT64_LAYER

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("pp", [2, 4], ids=lambda pp: f"pp{pp}")

S, B, D = 3, 2, 5
COUNTS = (1, 2, 3, 5, 8)
CASES = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("gpipe", 3),
    ("interleaved", 2),
    ("interleaved", 3),
    ("backwards_reversed", 1),
    ("forward_only", 1),
    ("forward_only", 2),
    ("forward_only_vee", 2),
]
SHORT_S = 0.5
"""For what never comes."""


def _weight(stage):
    generator = torch.Generator().manual_seed(stage)
    weight = torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5
    return weight.requires_grad_()


def _batches(m):
    generator = torch.Generator().manual_seed(100 + m)
    return list(torch.randn(m, S, B, D, generator=generator, dtype=torch.float64))


def _layer(weight, x):
    return torch.tanh(x @ weight)


def _program(name, pp, chunks, m):
    if name.startswith("forward_only"):
        return make_forward_only(Placement(pp=pp, chunks=chunks, is_vee=name.endswith("vee")), m)
    if name != "backwards_reversed":
        return make_schedule(name, Sizes(pp=pp, num_micro_batches=m, chunks=chunks))
    # No schedule of ours, but a legal one: the executor has to obey the list, not a habit.
    work = [Instruction(op=Op.FORWARD, micro_batch=i) for i in range(m)]
    work += [Instruction(op=Op.BACKWARD, micro_batch=i) for i in reversed(range(m))]
    return make_program([tuple(work)] * pp, Placement(pp=pp))


def _p2p(env, placement, timeout_s=ENDLESS_S):
    return PointToPoint(
        env.groups,
        placement=placement,
        shape=(S, B, D),
        dtype=torch.float64,
        device=env.device,
        timeout_s=timeout_s,
    )


def _stage_fn(stage, num_stages, weight):
    def run(batch, hidden):
        assert (hidden is None) == (stage == 0)
        output = _layer(weight, batch if hidden is None else hidden)
        return output.square().sum() if stage == num_stages - 1 else output

    return run


def _run_steps(env, cases):
    """(loss sum, weight gradient by stage) of each case, all in one world."""
    results = []
    for name, chunks, m in cases:
        program = _program(name, env.grid.pp, chunks, m)
        placement, schedule = program.placement, program.lists[env.coords.pp]
        stages = [placement.stage(env.coords.pp, chunk) for chunk in range(chunks)]
        weights = [_weight(stage) for stage in stages]
        fns = [_stage_fn(s, placement.num_stages, w) for s, w in zip(stages, weights, strict=True)]
        posts = receive_posts(program, env.coords.pp)
        executor = Executor(schedule, fns, _p2p(env, placement), posts=posts)
        output = executor.run(_batches(m), is_recording=True)
        assert [event.name for event in output.events] == [i.op for i in schedule]
        grads = {stage: weight.grad for stage, weight in zip(stages, weights, strict=True)}
        results.append((output.loss_sum, grads))
    return results


@functools.cache
def _wanted(num_stages, m):
    weights = [_weight(stage) for stage in range(num_stages)]
    x = functools.reduce(lambda x, w: _layer(w, x), weights, torch.stack(_batches(m)))
    loss = x.square().sum()
    loss.backward()
    return loss.detach(), [weight.grad for weight in weights]


@pytest.mark.sample(1)
@degrees
def test_loss_and_every_gradient_equal_the_unpipelined_step(pp):
    cases = [(name, chunks, m) for name, chunks in CASES for m in COUNTS]
    for name, chunks, m in cases:
        is_forward_only = name.startswith("forward_only")
        program = _program(name, pp, chunks, m)
        check(program, num_micro_batches=m, is_forward_only=is_forward_only)
    results = run_grid(_run_steps, Grid(pp=pp), cases)
    for case, (name, chunks, m) in enumerate(cases):
        loss, wanted = _wanted(pp * chunks, m)
        losses = [rank[case][0] for rank in results]
        grads = {stage: grad for rank in results for stage, grad in rank[case][1].items()}
        assert sum(value != 0 for value in losses) == 1
        torch.testing.assert_close(sum(losses), loss, rtol=FLOAT64_LAYER, atol=0)
        assert sorted(grads) == list(range(pp * chunks))
        for stage, grad in grads.items():
            if name.startswith("forward_only"):
                assert grad is None
            else:
                torch.testing.assert_close(grad, wanted[stage], rtol=0, atol=FLOAT64_LAYER)


def _fail_on_the_last(env):
    """Stage 1 hands back the gradient of micro-batch 0, fails at 1 and ends."""
    batches, stage = _batches(2), env.coords.pp
    work = _stage_fn(stage, 2, _weight(stage))

    def stage_fn(batch, hidden):
        if stage == 1 and batch is batches[1]:
            raise ZeroDivisionError("planted")
        return work(batch, hidden)

    p2p = _p2p(env, Placement(pp=2))
    program = _program("1f1b", 2, 1, 2)
    posts = receive_posts(program, stage)
    executor = Executor(program.lists[stage], [stage_fn], p2p, posts=posts)
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
    p2p = _p2p(env, Placement(pp=2), SHORT_S)
    try:
        if env.coords.pp == 0:
            p2p.post_send(tensor, Instruction(op=Op.SEND_FORWARD, micro_batch=3))
            p2p.wait_all()
        else:
            p2p.recv(Instruction(op=Op.RECV_FORWARD, micro_batch=7))
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_send_that_is_never_taken_fails_at_the_end_of_the_step():
    upper, lower = run_grid(_send_what_nobody_asks_for, Grid(pp=2))
    assert "stage 0, sending the activation of micro-batch 3 to stage 1" in upper
    assert "stage 1, receiving the activation of micro-batch 7 from stage 0" in lower


LENGTHS = (4, 1, 7, 7, 2)
LENGTH_CASES = [("1f1b", 1), ("interleaved", 2), ("zb_v", 2), ("forward_only_vee", 2)]


def _ragged():
    return [
        batch[:1].repeat(n, 1, 1) for batch, n in zip(_batches(len(LENGTHS)), LENGTHS, strict=True)
    ]


def _run_ragged(env, cases):
    results = []
    for name, chunks in cases:
        program = _program(name, env.grid.pp, chunks, len(LENGTHS))
        placement = program.placement
        stages = [placement.stage(env.coords.pp, chunk) for chunk in range(chunks)]
        weights = [_weight(stage) for stage in stages]
        fns = [_stage_fn(s, placement.num_stages, w) for s, w in zip(stages, weights, strict=True)]
        executor = Executor(
            program.lists[env.coords.pp],
            fns,
            _p2p(env, placement),
            posts=receive_posts(program, env.coords.pp),
            deferrals=[WeightGradQueue() for _ in stages],
        )
        loss = executor.run(_ragged(), is_recording=False, lengths=LENGTHS).loss_sum
        results.append((loss, dict(zip(stages, [w.grad for w in weights], strict=True))))
    return results


def test_micro_batches_of_different_lengths_pass_without_a_word_about_it():
    pp = 2
    results = run_grid(_run_ragged, Grid(pp=pp), LENGTH_CASES)
    for case, (name, chunks) in enumerate(LENGTH_CASES):
        weights = [_weight(stage) for stage in range(pp * chunks)]
        layers = functools.partial(functools.reduce, lambda x, w: _layer(w, x), weights)
        total = sum(layers(batch).square().sum() for batch in _ragged())
        total.backward()
        losses = [rank[case][0] for rank in results]
        torch.testing.assert_close(sum(losses), total.detach(), rtol=FLOAT64_LAYER, atol=0)
        for rank in results:
            for stage, grad in rank[case][1].items():
                if name.startswith("forward_only"):
                    assert grad is None
                else:
                    torch.testing.assert_close(
                        grad, weights[stage].grad, rtol=0, atol=FLOAT64_LAYER
                    )


LARGE = 2**20
"""Elements of a message that no socket takes before the receiver asks for it."""


def _die_in_a_send(env, folder):
    """Stage 1 of 3 is killed while micro-batch 1 leaves it; its neighbours tell what they saw.

    No timeout ends their waits.
    """
    batches, stage = [torch.zeros(LARGE, dtype=torch.float64) for _ in range(3)], env.coords.pp
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def stage_fn(batch, hidden):
        output = (batch if hidden is None else hidden) * weight
        if stage == 2:
            (folder / "begun").touch()
            while not _is_dead(folder / "died"):  # the next message is not asked for before
                time.sleep(0.01)
            return output.sum()
        return output

    p2p = PointToPoint(
        env.groups, placement=Placement(pp=3), shape=(LARGE,), dtype=torch.float64,
        device=env.device, timeout_s=ENDLESS_S,
    )  # fmt: skip
    if stage == 1:
        post_send = p2p.post_send

        def send_and_die(tensor, send, **options):
            post_send(tensor, send, **options)
            if send == Instruction(op=Op.SEND_FORWARD, micro_batch=1):
                while not (folder / "begun").exists():  # micro-batch 0 has been received whole
                    time.sleep(0.01)
                (folder / "died").write_text(f"{os.getpid()}\n")
                os.kill(os.getpid(), signal.SIGKILL)

        p2p.post_send = send_and_die
    program = _program("gpipe", 3, 1, 3)
    posts = receive_posts(program, stage)
    executor = Executor(program.lists[stage], [stage_fn], p2p, posts=posts)
    try:
        executor.run(batches, is_recording=False)
    except CommunicationError as error:
        (folder / f"stage-{stage}").write_text(str(error))
        raise


def _is_dead(path):
    """The process whose number, and a line's end, ``path`` holds."""
    if not path.exists() or not path.read_text().endswith("\n"):
        return False
    return process_state(int(path.read_text())) in ("", "Z", "X")


def test_neighbours_of_a_worker_that_dies_in_a_send_name_stage_micro_batch_and_peer(tmp_path):
    with pytest.raises(RankFailureError, match=r"rank 1 of 3: the process died of SIGKILL"):
        run_grid(_die_in_a_send, Grid(pp=3), tmp_path, collective_timeout_s=ENDLESS_S)
    wanted = {
        0: r"stage 0, (receiving the gradient of micro-batch 0 from|sending the activation of "
        r"micro-batch [12] to) stage 1",
        2: r"stage 2, receiving the activation of micro-batch 1 from stage 1",
    }
    for stage, pattern in wanted.items():
        text = (tmp_path / f"stage-{stage}").read_text()
        assert re.search(pattern, text), text
