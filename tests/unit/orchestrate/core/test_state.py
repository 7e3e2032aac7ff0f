import pytest

from raymega.errors import InternalError
from raymega.orchestrate.core.state import TRANSITIONS, RunState, State

ENDS = {State.FINISHED, State.FAILED, State.PREEMPTED}


def make_state(state):
    return RunState(state=state, attempt=1, step=7, saved_step=5, since_s=1.0, reason="")


def test_move_keeps_the_run_and_notes_when_and_why():
    state = make_state(State.RUNNING).move(State.RESTARTING, now_s=9.0, reason="rank 3 died")
    assert (state.state, state.since_s, state.reason) == (State.RESTARTING, 9.0, "rank 3 died")
    assert (state.attempt, state.step, state.saved_step) == (1, 7, 5)


@pytest.mark.parametrize("here", State)
@pytest.mark.parametrize("to", State)
def test_move_refuses_what_the_table_does_not_list(here, to):
    if to in TRANSITIONS[here]:
        assert make_state(here).move(to, now_s=2.0).state is to
        return
    with pytest.raises(InternalError, match=f"{here} was moved to {to}"):
        make_state(here).move(to, now_s=2.0)


def test_table_lists_every_state_and_ends_where_it_should():
    assert set(TRANSITIONS) == set(State)
    assert {state for state in State if state.is_end} == ENDS


@pytest.mark.parametrize("start", sorted(set(State) - ENDS))
def test_every_living_state_can_fail_and_be_stopped(start):
    reachable = set(TRANSITIONS[start])
    while more := {to for here in reachable for to in TRANSITIONS[here]} - reachable:
        reachable |= more
    assert State.FAILED in TRANSITIONS[start]
    assert State.PREEMPTED in reachable


def test_every_state_can_be_reached_from_the_first():
    reachable = {State.SCHEDULING}
    while more := {to for here in reachable for to in TRANSITIONS[here]} - reachable:
        reachable |= more
    assert reachable == set(State)
