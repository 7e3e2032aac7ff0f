"""The checker finds planted mistakes: in a list, between lists, and deadlocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.errors import InternalError
from raymega.schedule.checker import check
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.order import Sizes
from raymega.schedule.stage_placement import Placement, Program
from raymega.schedule.table import SCHEDULES, make_placement, make_schedule

M = 4


def _lists(name, *, pp, m, chunks=1):
    program = make_schedule(name, Sizes(pp=pp, num_micro_batches=m, chunks=chunks))
    return [list(schedule) for schedule in program.lists]


def _program(lists, placement=None):
    return Program(
        placement=placement or Placement(pp=len(lists)),
        lists=tuple(tuple(list_) for list_ in lists),
    )


@pytest.fixture
def lists():
    return _lists("1f1b", pp=3, m=M)


def _faults(lists, *, m=M, placement=None, **kwargs):
    with pytest.raises(InternalError) as caught:
        check(_program(lists, placement), num_micro_batches=m, **kwargs)
    return str(caught.value)


def _at(op, micro_batch=0):
    return Instruction(op=op, micro_batch=micro_batch)


def test_double_backward_is_named(lists):
    lists[2].append(_at(Op.BACKWARD, 3))
    assert "rank 2, micro-batch 3" in _faults(lists)


def test_missing_receive_is_named(lists):
    lists[1].remove(_at(Op.RECV_FORWARD, 2))
    assert "rank 1, micro-batch 2, chunk 0: forward, send_forward" in _faults(lists)


def test_missing_last_micro_batch_is_found_although_the_lists_agree():
    lists = _lists("1f1b", pp=2, m=M - 1)
    assert f"rank 1, micro-batch {M - 1}, chunk 0: nothing" in _faults(lists)


def test_extra_micro_batch_and_unknown_chunk_are_found(lists):
    lists[0].append(_at(Op.FORWARD, 9))
    lists[0].append(Instruction(op=Op.FORWARD, micro_batch=0, chunk=1))
    faults = _faults(lists)
    assert "rank 0, micro-batch 9" in faults and "micro-batch 0, chunk 1" in faults


def test_training_lists_are_no_evaluation_and_the_other_way_round(lists):
    assert "backward" in _faults(lists, is_forward_only=True)
    forwards = [[i for i in schedule if "backward" not in i.op] for schedule in lists]
    check(_program(forwards), num_micro_batches=M, is_forward_only=True)
    assert "it must undergo" in _faults(forwards)


def test_receiving_in_another_order_than_sent_is_found(lists):
    # Stage 0 hands over micro-batch 1 before 0; each list alone is right.
    first, second = lists[0][0:2], lists[0][2:4]
    lists[0][0:4] = second + first
    assert "rank 0 sends to rank 1 ['recv_forward 1', 'recv_forward 0'" in _faults(lists)


def test_deadlock_names_every_rank_that_waits():
    # Stage 0 wants the gradient of 0 before it sends 1, stage 1 wants 1 before it returns 0.
    lists = _lists("gpipe", pp=2, m=2)
    backward_0 = lists[0][4:6]
    lists[0] = lists[0][0:2] + backward_0 + lists[0][2:4] + lists[0][6:]
    faults = _faults(lists, m=2)
    assert "rank 0 waits for ever at instruction 2 of 8, recv_backward 0" in faults
    assert "rank 1 waits for ever at instruction 2 of 8, recv_forward 1" in faults


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_damage_to_a_list_goes_unseen(data):
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    pp, m, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6)), _chunks(data, name)
    lists = _lists(name, pp=pp, m=m, chunks=chunks)
    rank = lists[data.draw(st.integers(0, pp - 1))]
    at = data.draw(st.integers(0, len(rank) - 1))
    match data.draw(st.sampled_from(["drop", "repeat", "rename", "move", "swap"])):
        case "drop":
            del rank[at]
        case "repeat":
            rank.insert(data.draw(st.integers(0, len(rank))), rank[at])
        case "rename":
            rank[at] = _at(rank[at].op, rank[at].micro_batch + 1)
        case "move":
            rank[at] = Instruction(
                op=rank[at].op, micro_batch=rank[at].micro_batch, chunk=rank[at].chunk + 1
            )
        case "swap":
            mates = [j for j, other in enumerate(rank) if _are_bound(rank[at], other)]
            other = data.draw(st.sampled_from(mates)) if mates else at
            if other == at:
                return
            rank[at], rank[other] = rank[other], rank[at]
    _faults(lists, m=m, placement=make_placement(name, pp=pp, chunks=chunks))


def _chunks(data, name):
    kind = SCHEDULES[name]
    return data.draw(st.integers(kind.least_chunks, min(3, kind.most_chunks)))


def _are_bound(one, other):
    """Whether exchanging two instructions is wrong whatever lies between them."""
    return one != other and (one.micro_batch, one.chunk) == (other.micro_batch, other.chunk)


def test_whole_backward_after_its_parts_is_one_too_many():
    lists = _lists("zb_h1", pp=2, m=1)
    lists[1].append(_at(Op.BACKWARD, 0))
    assert "rank 1, micro-batch 0, chunk 0" in _faults(lists, m=1)


def test_peak_counts_forwards_before_their_backward():
    lists = _lists("gpipe", pp=1, m=5)
    assert check(_program(lists), num_micro_batches=5).peak_activations == (5,)
