"""comm over gloo: values of every operation, and what a wait that fails says."""

import os
import re
import threading
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from raymega.errors import CommunicationError, InternalError
from raymega.orchestrate.workers.thread_status import thread_status_of
from raymega.parallel.comm import collectives, work
from raymega.parallel.comm.collectives import DTYPES
from raymega.parallel.comm.world import abort_world, close_world
from raymega.plan.grid import Grid
from tests.support.ranks import ENDLESS_S, run_grid

pytestmark = pytest.mark.dist


SHIFTS = (1, 2, -1)


def _every_collective(env):
    """Results on this rank, by operation and dtype, as lists."""
    group, seen = env.groups.dp, {}
    for dtype in DTYPES:
        x = torch.arange(1, 2 * group.size + 1).view(-1, 2).to(dtype) + 10 * env.rank
        seen[dtype] = {
            "sum": collectives.all_reduce(x.clone(), group),
            "max": collectives.all_reduce(x.clone(), group, "max"),
            "all_gather": collectives.all_gather(x, group),
            "reduce_scatter": collectives.reduce_scatter(x, group),
            "broadcast": collectives.broadcast(x.clone(), group, source=1),
            "unchanged": x,
        }
    for by in SHIFTS:
        received, pending = collectives.start_shift(torch.tensor([env.rank, by]), group, by=by)
        pending.wait(group.timeout_s)
        seen[torch.int64][f"shift {by}"] = received
    collectives.barrier(group)
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_give_the_values_of_their_names(size):
    inputs = [torch.arange(1, 2 * size + 1).view(-1, 2) + 10 * rank for rank in range(size)]
    total = torch.stack(inputs).sum(0)
    for rank, seen in enumerate(run_grid(_every_collective, Grid(dp=size))):
        assert seen.keys() == DTYPES
        for dtype, results in seen.items():
            expected = {
                "sum": total,
                "max": inputs[-1],
                "all_gather": torch.cat(inputs),
                "reduce_scatter": total[rank : rank + 1],
                "broadcast": inputs[1],
                "unchanged": inputs[rank],
            } | {f"shift {by}": torch.tensor([(rank - by) % size, by]) for by in SHIFTS}
            for name, value in results.items():
                assert value.dtype == dtype and value.is_contiguous()
                assert torch.equal(value, expected[name].to(dtype)), (name, dtype)


def _after_failed_coalescing(env):
    """From then on dist.all_reduce returns at once and does nothing on this group."""
    group = env.groups.dp.resolve()
    attempt = dist.distributed_c10d._coalescing_manager(group=group, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="startCoalescing"), attempt:
        dist.all_reduce(torch.ones(2), group=group)
    return collectives.all_reduce(torch.ones(2), env.groups.dp).tolist()


def test_a_failed_coalescing_attempt_does_no_harm():
    assert run_grid(_after_failed_coalescing, Grid(dp=2)) == [[2.0, 2.0]] * 2


def _refusals(env):
    group, texts = env.groups.dp, []
    for misuse in (
        lambda: collectives.all_reduce(torch.ones(8)[::2], group),
        lambda: collectives.reduce_scatter(torch.ones(5), group),
        lambda: collectives.isend(torch.ones(1), group, 7, 0),
        lambda: collectives.all_reduce(torch.ones(2, device="meta"), group),
    ):
        with pytest.raises(InternalError) as caught:
            misuse()
        texts.append(str(caught.value))
    return texts, collectives.all_reduce(torch.ones(1), group).item()


def test_a_refused_operation_leaves_the_group_usable():
    texts, total = run_grid(_refusals, Grid(dp=2))[0]
    assert "strides (2,)" in texts[0] and "multiple of 2" in texts[1]
    assert "peer 7 from place 0" in texts[2] and "lives on meta" in texts[3]
    assert total == 2.0


def _late_by_more_than_a_turn(env, folder):
    """Rank 1 comes to each collective after rank 0 has looked for an abort twice."""
    group, results = env.groups.dp, []
    x = torch.arange(4.0) + env.rank
    for name, operation in (
        ("all_reduce", lambda: collectives.all_reduce(x.clone(), group)),
        ("all_gather", lambda: collectives.all_gather(x, group)),
        ("broadcast", lambda: collectives.broadcast(x.clone(), group, source=1)),
    ):
        if env.rank == 1:
            _wait_for_file(folder / f"{name}-2")
        else:
            _tell_of_looks(folder, name)
        results.append(operation().tolist())
    return results


def _tell_of_looks(folder, name):
    """A file for each time that this rank looks whether its world was aborted."""
    numbers = count(1)

    def is_initialized():
        (folder / f"{name}-{next(numbers)}").touch()
        return True

    work.dist = SimpleNamespace(is_initialized=is_initialized)


def _wait_for_file(path):
    """Until it is there, or this rank is ended."""
    while not path.exists():
        time.sleep(0.01)


def test_collectives_that_last_several_turns_are_right(tmp_path):
    mine, other = [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]
    results = [[1.0, 3.0, 5.0, 7.0], mine + other, other]
    assert run_grid(_late_by_more_than_a_turn, Grid(dp=2), tmp_path) == [results] * 2


def _late_reduce_scatter(env, path):
    """Rank 1 comes when rank 0 waits; torch's own wait over gloo takes no turns."""
    x, waiting = torch.arange(4.0) + env.rank, threading.current_thread()

    def tell():
        while not thread_status_of(waiting, rank=0, step=0).waits_for:
            time.sleep(0.01)
        path.touch()

    if env.rank == 0:
        threading.Thread(target=tell, daemon=True).start()
    else:
        _wait_for_file(path)
    return collectives.reduce_scatter(x, env.groups.dp).tolist()


def test_reduce_scatter_that_one_rank_comes_late_to_is_right(tmp_path):
    results = run_grid(_late_reduce_scatter, Grid(dp=2), tmp_path / "waits")
    assert results == [[1.0, 3.0], [5.0, 7.0]]


def _transfers(env):
    """Two messages each way, taken in the other order; sends are posted first on both sides."""
    group, peer = env.groups.pp_forward, 1 - env.rank
    sends = [
        collectives.isend(torch.full((3,), 10.0 * env.rank + t), group, peer, t) for t in (0, 1)
    ]
    received = []
    for tag in (1, 0):
        buffer = torch.empty(3)
        collectives.irecv(buffer, group, peer, tag).wait(group.timeout_s)
        received.append(buffer.tolist())
    for send in sends:
        send.wait(group.timeout_s)
    return received, all(send.is_done() for send in sends)


def test_posted_transfers_meet_by_tag():
    results = run_grid(_transfers, Grid(pp=2))
    assert results == [([[11.0] * 3, [10.0] * 3], True), ([[1.0] * 3, [0.0] * 3], True)]


def _overlapping_reductions(env):
    tensors = [torch.full((100,), float(i + env.rank)) for i in range(5)]
    reductions = [collectives.start_all_reduce(tensor, env.groups.dp) for tensor in tensors]
    for reduction in reversed(reductions):
        reduction.wait(env.groups.dp.timeout_s)
    return [tensor.unique().tolist() for tensor in tensors], reductions[0].is_done()


def test_several_reductions_may_be_under_way():
    assert run_grid(_overlapping_reductions, Grid(dp=2))[0] == (
        [[2.0 * i + 1] for i in range(5)],
        True,
    )


def _error_of(operation):
    try:
        operation()
    except CommunicationError as error:
        return str(error), collectives.is_communication_error(error)
    return "no error", False


def _both_wait(env, kind):
    """Both ranks wait for something that the other does not do, for half a second."""
    if kind == "receive":
        group = env.groups.pp_forward
        return _error_of(lambda: collectives.irecv(torch.ones(1), group, 1 - env.rank, 3).wait(0.5))
    group = replace(env.groups.pp_forward if env.rank else env.groups.pp_backward, timeout_s=0.5)
    return _error_of(lambda: collectives.all_reduce(torch.ones(1), group))


def _check_wait(text):
    """No less than the timeout of half a second; what ends it otherwise is beyond the test's end."""
    assert float(re.search(r"failed after (\d+\.\d) s", text)[1]) >= 0.5
    assert "elastic.collective_timeout_s=0.5 s" in text


def test_a_transfer_that_never_comes_names_peer_tag_seconds_and_setting():
    results = run_grid(_both_wait, Grid(pp=2), "receive", collective_timeout_s=ENDLESS_S)
    for rank, (text, is_communication) in enumerate(results):
        assert f"receive from rank {1 - rank}, tag 3, on group pp_forward of ranks 0, 1" in text
        _check_wait(text)
        assert is_communication


def test_a_collective_that_never_meets_names_group_ranks_seconds_and_setting():
    results = run_grid(_both_wait, Grid(pp=2), "all_reduce", collective_timeout_s=ENDLESS_S)
    names = ("pp_backward", "pp_forward")
    for group, (text, is_communication) in zip(names, results, strict=True):
        assert f"all_reduce on group {group} of ranks 0, 1 failed after" in text
        _check_wait(text)
        assert is_communication


def _wait_no_time(env):
    group = env.groups.pp_forward
    return _error_of(lambda: collectives.irecv(torch.ones(1), group, 1 - env.rank, 3).wait(0.0))


def test_a_timeout_of_zero_is_not_taken_for_no_limit():
    """It would end with the test."""
    results = run_grid(_wait_no_time, Grid(pp=2), collective_timeout_s=ENDLESS_S)
    assert all("failed after" in text and is_failed for text, is_failed in results)


def _wait_for_a_rank_that_leaves(env, how, kind, path):
    """Its process lives on until this is known."""
    group = env.groups.pp_forward
    if env.rank == 1:
        how()
        _wait_for_file(path)
        return None
    if kind == "receive":
        seen = _error_of(
            lambda: collectives.irecv(torch.ones(1), group, 1, 0).wait(group.timeout_s)
        )
    else:
        seen = _error_of(lambda: collectives.all_reduce(torch.ones(1), group))
    path.touch()
    return seen


@pytest.mark.parametrize("how", [abort_world, close_world], ids=["aborts", "closes"])
@pytest.mark.parametrize("kind", ["receive", "all_reduce"])
def test_a_rank_learns_at_once_that_its_peer_left(how, kind, tmp_path):
    text, is_communication = run_grid(
        _wait_for_a_rank_that_leaves, Grid(pp=2), how, kind, tmp_path / "seen",
        collective_timeout_s=ENDLESS_S,
    )[0]  # fmt: skip
    assert kind in text and is_communication


def _outlive_a_peer_that_dies(env, path):
    if env.rank == 1:
        os._exit(1)
    text, is_communication = _error_of(
        lambda: collectives.irecv(torch.ones(1), env.groups.pp_forward, 1, 0).wait(ENDLESS_S)
    )
    path.write_text(f"{is_communication} {text}")


def test_a_rank_learns_that_its_peer_died(tmp_path):
    path = tmp_path / "seen"
    with pytest.raises(Exception, match="rank 1 of 2: the process ended with exit code 1"):
        run_grid(_outlive_a_peer_that_dies, Grid(pp=2), path)
    assert path.read_text().startswith("True receive from rank 1, tag 0, on group pp_forward")


def _use_after_close(env):
    close_world()
    return _error_of(lambda: collectives.all_reduce(torch.ones(1), env.groups.dp))[0]


def test_a_group_of_a_closed_world_is_gone():
    text = run_grid(_use_after_close, Grid(dp=2))[0]
    assert "group dp is gone" in text and "open a world" in text
