"""Groups: members and order on gloo, large grids on torch's fake backend, taking the world down."""

import os
import random
import signal
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raymega.errors import CommunicationError, InternalError
from raymega.orchestrate.workers.thread_status import thread_status_of
from raymega.parallel.comm import world
from raymega.parallel.comm.collectives import all_gather, all_reduce, irecv, is_communication_error
from raymega.parallel.comm.process_groups import MOST_IN_WORLD, NO_HANDLE, build_groups
from raymega.plan.grid import Grid
from tests.support.ranks import ENDLESS_S, run_alone, run_grid, run_ranks

pytestmark = pytest.mark.dist

AXES = {
    "tp": "tp",
    "cp": "cp",
    "cp_outer": "cp",
    "dp": "dp",
    "replicas": ("cp", "dp"),
    "pp_forward": "pp",
    "pp_backward": "pp",
    "micro": ("tp", "cp"),
    "sharers": ("cp", "dp"),
}
EXPERT_AXES = ("etp", "ep", "edp")


def _wanted(grid, rank):
    """Members of every group whose members follow from the grid alone."""
    return {name: sorted(grid.group(axes, rank)) for name, axes in AXES.items()} | {
        axis: sorted(grid.expert_group(axis, rank)) for axis in EXPERT_AXES
    } | {
        "copies": [rank],
        "expert_sharers": sorted(grid.expert_group("edp", rank)),
        "expert_copies": [rank],
    }  # fmt: skip


def _members(env):
    """What each group's own collective says about who is in it, and in which order."""
    here = torch.tensor([env.rank])
    return {
        field.name: all_gather(here, getattr(env.groups, field.name)).tolist()
        for field in fields(env.groups)
        if field.name != "nested"
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "grid",
    [
        Grid(tp=2, dp=2, pp=2),
        Grid(pp=3, tp=2),
        Grid(pp=4),
        Grid(cp=2, dp=3),
        Grid(tp=2, cp=2, pp=2, order="dp-cp-pp-ep-tp"),
        Grid(tp=2, dp=2, pp=2, order="pp-dp-cp-ep-tp"),
        Grid(tp=2, cp=2, pp=2, ep=2, etp=1),
        Grid(tp=2, dp=3, etp=3, ep=2, order="dp-pp-tp-ep-cp"),
    ],
    ids=lambda grid: f"{grid.describe()}-{grid.order}",
)
def test_groups_hold_the_ranks_of_the_grid_in_ascending_order(grid):
    for rank, members in enumerate(run_grid(_members, grid)):
        assert members.pop("world") == list(range(grid.world_size))
        stage = grid.coords(rank).pp
        ends = [grid.rank(replace(grid.coords(rank), pp=p)) for p in (0, grid.pp - 1)]
        is_end = grid.pp > 1 and stage in (0, grid.pp - 1)
        assert members.pop("embedding") == (ends if is_end else [rank])
        assert members.pop("cp_inner") == [rank]
        assert members == _wanted(grid, rank)


def test_hybrid_sharding_has_neighbours_inside_and_their_likes_across():
    grid = Grid(tp=2, dp=4)
    for rank, members in enumerate(run_grid(_members, grid, sharers=2)):
        place, first = divmod(rank, 2)
        pair = [first, first + 2] if place < 2 else [first + 4, first + 6]
        assert members["sharers"] == pair
        assert members["copies"] == sorted({rank, (rank + 4) % 8})
        assert members["expert_sharers"] == [rank - rank % 2, rank - rank % 2 + 1]


DENSE = ("cp", "dp", "micro", "etp", "ep", "edp", "expert_sharers", "expert_copies", "embedding")


def _communicators(env):
    """Names that share each communicator, and what a group without one says."""
    shared = {}
    for group in (getattr(env.groups, field.name) for field in fields(env.groups)):
        if group and group.handle:
            shared.setdefault(group.handle, set()).add(group.name)
    try:
        all_reduce(torch.ones(1), replace(env.groups.embedding, handle=NO_HANDLE))
    except InternalError as error:
        return sorted(map(sorted, shared.values())), str(error)


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        (Grid(tp=2), [["tp", "world"]]),
        (Grid(dp=2), [["replicas", "sharers", "world"]]),
        # keys and values must not wait behind gradients
        (Grid(cp=2), [["cp_outer", "world"], ["replicas", "sharers"]]),
        (
            Grid(tp=2, pp=2, dp=2),
            [["pp_backward"], ["pp_forward"], ["replicas", "sharers"], ["tp"], ["world"]],
        ),
    ],
    ids=str,
)
def test_groups_of_equal_ranks_and_purpose_share_a_communicator_and_unused_ones_have_none(
    grid, wanted
):
    for found, text in run_grid(_communicators, grid, unused=DENSE):
        assert found == wanted
        assert "group embedding has no communicator" in text


LARGE = [Grid(tp=8, pp=16, dp=128), Grid(tp=4, cp=4, pp=8, dp=8), Grid(tp=4, pp=8, dp=16), Grid(tp=2, pp=3, dp=5),
    Grid(tp=4, cp=2, pp=4, dp=32, ep=8), Grid(tp=4, cp=4, pp=8, dp=8, etp=2, ep=16, order="tp-cp-dp-ep-pp"),
]  # fmt: skip


CALLS_A_MEMBER, MEMBERS_OF_NO_GROUP = 60, 20
"""Of Python, most of them torch's own; the second is for what is done whatever the groups."""
MOST_TWINS = 3
"""Groups of the same ranks as another: the second of pp, and those of ep and edp."""


def _open_on_fake_backend(grid, ranks, sharers=0):
    """Rank lists and torch's name of every group, for each of ``ranks``; and how each was built."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen, costs = {}, {}
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
        is_counted = rank in (ranks[0], ranks[-1])
        groups, costs[rank] = _cost_of(
            lambda rank=rank: build_groups(grid, rank, timeout_s=5.0, sharers=sharers),
            is_counted=is_counted,
        )
        seen[rank] = {
            field.name: (
                dist.get_process_group_ranks(group.resolve()) if group.handle else [rank],
                group.handle or "",
                group.index,
            )
            for field in fields(groups)
            if field.name != "nested"
            for group in [getattr(groups, field.name)]
        }
        dist.destroy_process_group()
    return seen, costs


def _cost_of(build, *, is_counted):
    """What it makes; the ranks of each group that torch was asked for, and Python's calls.

    Counting them makes it several times slower.
    """
    asked, num_calls, new_group = [], 0, dist.new_group

    def note(ranks, **options):
        asked.append(ranks)
        return new_group(ranks, **options)

    def count(_frame, event, _word):
        nonlocal num_calls
        num_calls += event == "call"

    dist.new_group = note
    sys.setprofile(count if is_counted else None)
    try:
        return build(), (asked, num_calls)
    finally:
        sys.setprofile(None)
        dist.new_group = new_group


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", LARGE, ids=Grid.describe)
def test_large_grids_are_cut_as_planned_and_members_agree_on_names(grid):
    """Members that compute different names would wait for each other for ever on a real backend.

    A rank makes its own groups only, each once, and works in proportion to their members.
    """
    sampled = set(random.Random(0).sample(range(grid.world_size), k=min(64, grid.world_size)))
    sampled |= {*grid.group(("tp", "pp"), 0), *grid.group("dp", 5), grid.world_size - 1}
    seen, costs = run_alone(_open_on_fake_backend, grid, sorted(sampled))
    names = {}
    for rank, groups in seen.items():
        for name, wanted in _wanted(grid, rank).items():
            ranks, _, index = groups[name]
            assert ranks == wanted and ranks[index] == rank
        is_whole = grid.world_size <= MOST_IN_WORLD
        assert groups["world"][0] == (list(range(grid.world_size)) if is_whole else [rank])
        for name, (ranks, torch_name, _) in groups.items():
            assert names.setdefault((name, tuple(ranks)), torch_name) == torch_name
    owners = {}
    for (_, ranks), torch_name in names.items():
        assert not torch_name or owners.setdefault(torch_name, ranks) == ranks
        assert bool(torch_name) == (len(ranks) > 1)
    for rank, (asked, num_calls) in costs.items():
        assert all(rank in ranks for ranks in asked)
        assert all(len(ranks) < grid.world_size for ranks in asked)
        assert len(asked) <= len(set(map(tuple, asked))) + MOST_TWINS
        assert num_calls <= CALLS_A_MEMBER * (sum(map(len, asked)) + MEMBERS_OF_NO_GROUP)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("grid", "sharers"),
    [
        (Grid(dp=8, ep=2), 2),
        (Grid(tp=2, dp=8, ep=4), 2),
        (Grid(dp=8, ep=2, order="tp-cp-dp-ep-pp"), 2),
        (Grid(tp=2, cp=2, dp=4, ep=2, etp=2), 2),
    ],
    ids=lambda each: each.describe() if isinstance(each, Grid) else str(each),
)
def test_experts_are_sharded_within_the_ranks_that_hold_them_and_summed_over_their_copies(
    grid, sharers
):
    """Copies of experts are others than copies of dense weights: each is cut within its own replicas."""
    seen, _ = run_alone(_open_on_fake_backend, grid, [*range(grid.world_size)], sharers)
    for kind, name in (("", "replicas"), ("expert_", "edp")):
        for rank, groups in seen.items():
            whole, inside, across = (
                groups[each][0] for each in (name, f"{kind}sharers", f"{kind}copies")
            )
            assert len(inside) == sharers and sorted(whole) == whole
            # the copies are the neighbours in order, and each of this rank's peers is in another one
            place = whole.index(rank)
            assert inside == whole[place - place % sharers :][:sharers]
            assert across == [r for r in whole if whole.index(r) % sharers == place % sharers]
            assert set(inside) & set(across) == {rank}
            assert {r for peer in across for r in seen[peer][f"{kind}sharers"][0]} == set(whole)


def _abort_when_stuck():
    """From another thread, once this one waits for an operation; nothing else ends its wait."""
    stuck = threading.current_thread()

    def abort():
        while not thread_status_of(stuck, rank=0, step=0).waits_for:
            time.sleep(0.01)
        world.abort_world()

    threading.Thread(target=abort, daemon=True).start()


def _wait_for_a_rank_that_never_comes(env, path):
    if env.rank == 1:
        dist.FileStore(path, 2).get("rank 0 is free")
        return None
    _abort_when_stuck()
    try:
        all_reduce(torch.ones(1), env.groups.world)
    except CommunicationError as error:
        dist.FileStore(path, 2).set("rank 0 is free", "yes")
        return is_communication_error(error), dist.is_initialized()


def test_abort_from_another_thread_frees_a_rank_that_is_stuck(tmp_path):
    results = run_grid(
        _wait_for_a_rank_that_never_comes, Grid(dp=2), str(tmp_path / "f"),
        collective_timeout_s=ENDLESS_S,
    )  # fmt: skip
    is_communication, is_open = results[0]
    assert is_communication and not is_open


def _wait_for_a_rank_that_stands_still(env, path):
    if env.rank == 1:
        Path(path).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    group = env.groups.pp_forward
    while not is_stopped(path):
        time.sleep(0.05)
    _abort_when_stuck()
    try:
        irecv(torch.ones(1), group, 1, 0).wait(group.timeout_s)
    except CommunicationError as error:
        return is_communication_error(error)
    finally:
        os.kill(int(Path(path).read_text()), signal.SIGCONT)


def is_stopped(path):
    """The process whose number ``path`` holds."""
    if not Path(path).exists():
        return False
    status = Path(f"/proc/{Path(path).read_text()}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


def test_abort_ends_a_transfer_from_a_process_that_is_stopped(tmp_path):
    assert run_grid(
        _wait_for_a_rank_that_stands_still, Grid(pp=2), str(tmp_path / "pid"),
        collective_timeout_s=ENDLESS_S,
    )[0]  # fmt: skip


def _meet_again_after_abort(rank, world_size, folder):
    sys.excepthook = hook = sys.__excepthook__
    first = build_groups(Grid(tp=world_size), rank, timeout_s=60.0)
    sums = [all_reduce(torch.tensor([rank]), first.tp).item()]
    world.abort_world()
    for attempt in (1, 2):
        world.open_world(
            rank=rank,
            world_size=world_size,
            rendezvous="",
            store=dist.FileStore(f"{folder}/{attempt}", world_size),
            timeout_s=60.0,
            device=torch.device("cpu"),
        )
        groups = build_groups(Grid(tp=world_size), rank, timeout_s=60.0)
        sums.append(all_reduce(torch.tensor([rank + attempt]), groups.tp).item())
        world.close_world()
    assert sys.excepthook is hook, "torch's of each world would stay in the process"
    return sums


def test_the_same_processes_meet_again_after_an_abort_and_a_close(tmp_path):
    assert run_ranks(_meet_again_after_abort, 2, str(tmp_path)) == [[1, 3, 5]] * 2


def _meet_after_nobody_came(rank, world_size, folder):
    """Rank 0 has waited in vain once, as a survivor does whose new peer is lost too."""
    world.close_world()

    def meet(name, timeout_s):
        world.open_world(
            rank=rank,
            world_size=world_size,
            rendezvous="",
            store=dist.FileStore(f"{folder}/{name}", world_size),
            timeout_s=timeout_s,
            device=torch.device("cpu"),
        )

    if rank == 0:
        with pytest.raises(CommunicationError):
            meet("nobody", 0.2)
    meet("all", 60.0)
    group = build_groups(Grid(tp=world_size), rank, timeout_s=60.0).world
    return all_reduce(torch.ones(1), group).item()


def test_survivor_of_a_meeting_that_failed_meets_a_process_that_saw_none(tmp_path):
    assert run_ranks(_meet_after_nobody_came, 2, str(tmp_path)) == [2.0, 2.0]


def _meet_over_tcp(address, rank, timeout_s):
    world.open_world(
        rank=rank,
        world_size=2,
        rendezvous=address,
        store=None,
        timeout_s=timeout_s,
        device=torch.device("cpu"),
    )


def _meet_by_rendezvous(rank, _world_size, path):
    """Rank 0 hosts the store of a second world and passes its address through a file."""
    world.close_world()
    if rank == 0:
        address, store = world.host_store("127.0.0.1")
        dist.FileStore(path, 2).set("address", address)
    else:
        address, store = dist.FileStore(path, 2).get("address").decode(), None
    _meet_over_tcp(address, rank, 60.0)
    group = build_groups(Grid(dp=2), rank, timeout_s=60.0).world
    return all_reduce(torch.ones(1), group).item(), store is not None


def test_ranks_meet_at_a_store_on_a_fresh_port(tmp_path):
    assert run_ranks(_meet_by_rendezvous, 2, str(tmp_path / "f")) == [(2.0, True), (2.0, False)]


def _meet_nobody():
    address, _store = world.host_store("127.0.0.1")
    try:
        _meet_over_tcp(address, 0, 1.0)
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_missing_rank_is_told_with_seconds_and_setting():
    text = run_alone(_meet_nobody)
    assert "rank 0 could not open the world" in text
    assert "elastic.collective_timeout_s=1 s" in text
