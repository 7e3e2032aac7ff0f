"""Receives are posted ahead of their use, and no ranks wait for each other even if each drains its GPU."""

import pytest

from raymega.schedule.instructions import COMPUTE, RECEIVE, SEND, Op
from raymega.schedule.order import Sizes
from raymega.schedule.posting import receive_posts
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import SCHEDULES, make_forward_only, make_schedule
from raymega.schedule.transfers import rounds

NAMES = [*SCHEDULES, "forward_only"]
PAIRED = {"dualpipe_v"}
COUNTS = (1, 2, 3, 5, 8, 16)


def _programs(name, pp):
    """Programs of a schedule with their number of micro-batches, and whether passes run in pairs."""
    for m in COUNTS:
        if name == "forward_only":
            for chunks, is_vee in ((1, False), (2, False), (2, True)):
                yield make_forward_only(Placement(pp=pp, chunks=chunks, is_vee=is_vee), m), False
            continue
        kind = SCHEDULES[name]
        if name == "dualpipe_v" and m < 2 * pp:
            m = 2 * pp
        for chunks in sorted({kind.least_chunks, min(3, kind.most_chunks)}):
            for is_paired in {False, name in PAIRED}:
                sizes = Sizes(pp=pp, num_micro_batches=m, chunks=chunks)
                yield make_schedule(name, sizes), is_paired


def _at_once(program, *, is_paired):
    """Every receive at the start of the step."""
    for schedule in program.lists:
        receives = tuple(task for task in schedule if task.op in RECEIVE)
        yield (receives, *[()] * (len(rounds(schedule, is_paired=is_paired)) - 1))


def _where_needed(program, *, is_paired):
    for schedule in program.lists:
        parts = rounds(schedule, is_paired=is_paired)
        yield tuple(tasks if tasks[0].op in RECEIVE else () for tasks in parts)


def _one_round_ahead(program, *, is_paired):
    """Each receive before the last round of work that precedes its use."""
    for schedule in program.lists:
        parts = rounds(schedule, is_paired=is_paired)
        posts, work = [[] for _ in parts], 0
        for place, tasks in enumerate(parts):
            if tasks[0].op in COMPUTE:
                work = place
            elif tasks[0].op in RECEIVE:
                posts[work].extend(tasks)
        yield posts


def _decided(program, *, is_paired):
    for rank in range(program.placement.pp):
        yield receive_posts(program, rank, is_paired=is_paired)


def _is_stuck(program, posts, *, is_paired):
    """Whether ranks wait for ever, if each waits for all of its transfers before each round of work.

    This is what a GPU does that loads a kernel or frees memory in each round. A rank that waits less
    does everything earlier, so it cannot be stuck where this one is not.
    """
    parts = [rounds(schedule, is_paired=is_paired) for schedule in program.lists]
    places, seen = [0] * len(parts), set()
    needs = [set() for _ in parts]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, tasks_of in enumerate(parts):
            while places[rank] < len(tasks_of):
                place = places[rank]
                # once: transfers that begin before this round
                for task in posts[rank][place]:
                    _begin(program, rank, task, seen, needs[rank])
                task = tasks_of[place][0]
                if task.op in SEND:
                    _begin(program, rank, task, seen, needs[rank])
                elif task.op in COMPUTE:
                    if not needs[rank] <= seen:
                        break
                    needs[rank].clear()
                places[rank] += 1
                has_moved = True
    return any(place < len(tasks) for place, tasks in zip(places, parts, strict=True))


def _begin(program, rank, task, seen, needed):
    """A transfer begins on this rank, and is over when the peer's part has begun."""
    message = program.placement.message(rank, task)
    if message is not None and message.sender.rank != message.receiver.rank:
        is_receive = task.op in RECEIVE
        if (is_receive, message) not in seen:
            seen.add((is_receive, message))
            needed.add((not is_receive, message))


@pytest.mark.sample(8)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_waits_for_ever_where_each_waits_for_its_device_before_each_round(name, pp):
    for program, is_paired in _programs(name, pp):
        posts = list(_decided(program, is_paired=is_paired))
        assert not _is_stuck(program, posts, is_paired=is_paired)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_at_the_start_or_always_one_round_ahead_would_deadlock(name):
    """So the test above can tell, and a simpler rule is not enough."""
    for rule in (_at_once, _one_round_ahead):
        stuck = [
            _is_stuck(program, list(rule(program, is_paired=is_paired)), is_paired=is_paired)
            for program, is_paired in _programs(name, 4)
        ]
        assert any(stuck)


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipe_v"])
def test_receives_where_they_are_needed_would_deadlock_on_sends(name):
    assert any(
        _is_stuck(program, list(_where_needed(program, is_paired=is_paired)), is_paired=is_paired)
        for program, is_paired in _programs(name, 4)
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_each_receive_is_posted_once_in_the_order_of_sends_and_not_after_its_use(name):
    for program, is_paired in _programs(name, 4):
        sends = {}
        for rank, schedule in enumerate(program.lists):
            for task in schedule:
                message = program.placement.message(rank, task) if task.op in SEND else None
                if message and message.receiver.rank != message.sender.rank:
                    sends.setdefault((rank, message.receiver.rank), []).append(message)
        for rank, posts in enumerate(_decided(program, is_paired=is_paired)):
            parts = rounds(program.lists[rank], is_paired=is_paired)
            order = [(place, task) for place, tasks in enumerate(posts) for task in tasks]
            assert all(place <= parts.index((task,)) for place, task in order)
            messages = [program.placement.message(rank, task) for _, task in order]
            for peer in {message.sender.rank for message in messages}:
                of_peer = [message for message in messages if message.sender.rank == peer]
                assert of_peer == sends[peer, rank]


def _leads(program, *, is_paired):
    """Rounds of work between post and use, of each receive."""
    for rank, posts in enumerate(_decided(program, is_paired=is_paired)):
        parts = rounds(program.lists[rank], is_paired=is_paired)
        for place, tasks in enumerate(posts):
            for task in tasks:
                between = parts[place : parts.index((task,))]
                yield sum(part[0].op in COMPUTE for part in between)


@pytest.mark.parametrize(
    ("name", "share", "most"),
    [
        ("1f1b", 0.45, 2),  # its activations are sent when they are needed
        ("gpipe", 0.95, 1),
        ("interleaved", 0.85, 3),
        ("zb_h1", 0.95, 2),
        ("zb_h2", 0.9, 3),
        ("zb_auto", 0.95, 2),
        ("zb_v", 0.9, 4),
        ("dualpipe_v", 0.9, 3),
    ],
)
def test_most_receives_are_posted_a_few_rounds_of_work_ahead(name, share, most):
    kind = SCHEDULES[name]
    sizes = Sizes(pp=4, num_micro_batches=32, chunks=kind.least_chunks)
    leads = list(_leads(make_schedule(name, sizes), is_paired=False))
    assert max(leads) == most
    assert sum(lead > 0 for lead in leads) >= share * len(leads)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_stage_posts_no_receive_before_its_first_forward(name):
    """And the gradient's just before work that precedes it, not with the step's first."""
    kind = SCHEDULES[name]
    program = make_schedule(name, Sizes(pp=4, num_micro_batches=8, chunks=kind.least_chunks))
    parts = rounds(program.lists[0], is_paired=False)
    posts = receive_posts(program, 0)
    first = next(place for place, tasks in enumerate(parts) if tasks[0].op is Op.FORWARD)
    assert not any(posts[: first + 1])
