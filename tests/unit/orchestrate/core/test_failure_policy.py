import pytest

from raymega.errors import DataError, NumericsError, PlanError, WorkerError
from raymega.orchestrate.core.failure_policy import (
    Action,
    Failure,
    FailureKind,
    FailurePolicy,
    give_up_error,
)

POLICY = FailurePolicy(max_failures=3)


def died(rank=1, step=5):
    return Failure(kind=FailureKind.DIED, rank=rank, step=step, message="SIGKILL")


def raised(rank=1, step=5, error="ValueError", exit_code=1):
    return Failure(
        kind=FailureKind.RAISED,
        rank=rank,
        step=step,
        error=error,
        message="bad",
        exit_code=exit_code,
    )


def test_decide_restarts_after_a_death():
    decision = POLICY.decide([], died())
    assert decision.action is Action.RESTART
    assert decision.reason == "restart 1 of at most 3"


def test_decide_gives_up_when_the_budget_is_spent():
    earlier = [died(step=step) for step in (1, 2, 3)]
    assert POLICY.decide(earlier[:2], died()).action is Action.RESTART
    decision = POLICY.decide(earlier, died())
    assert decision.action is Action.GIVE_UP
    assert "elastic.max_failures=3" in decision.reason


def test_a_lost_node_that_takes_the_next_attempt_with_it_costs_one_restart():
    crash = [died(rank=1), died(rank=-1)]
    assert "restart 1 of" in POLICY.decide(crash[:1], crash[1]).reason
    assert "restart 2 of" in POLICY.decide(crash, died()).reason
    assert POLICY.decide(3 * crash, died()).action is Action.GIVE_UP
    nobody = 3 * [died(rank=-1)]
    assert POLICY.decide(nobody, died(rank=-1)).action is Action.GIVE_UP, "echoes of nothing"


def test_decide_gives_up_at_once_when_no_restart_is_allowed():
    assert FailurePolicy(max_failures=0).decide([], died()).action is Action.GIVE_UP


def test_decide_gives_up_on_the_same_error_three_times_in_a_row():
    policy = FailurePolicy(max_failures=100)
    assert policy.decide([raised()], raised()).action is Action.RESTART
    decision = policy.decide([raised(rank=0), raised(rank=3)], raised(rank=1))
    assert decision.action is Action.GIVE_UP
    assert "3 times in a row" in decision.reason


@pytest.mark.parametrize("third", [raised(step=6), raised(error="KeyError"), died()], ids=str)
def test_decide_restarts_when_the_third_failure_is_another(third):
    policy = FailurePolicy(max_failures=100)
    assert policy.decide([raised(), raised()], third).action is Action.RESTART


def test_decide_restarts_when_equal_errors_do_not_follow_each_other():
    policy = FailurePolicy(max_failures=100)
    assert policy.decide([raised(), raised(), died()], raised()).action is Action.RESTART


def test_decide_does_not_take_deaths_for_mistakes_of_the_code():
    policy = FailurePolicy(max_failures=100)
    assert policy.decide([died(), died()], died()).action is Action.RESTART


@pytest.mark.parametrize("error", [NumericsError, DataError, PlanError])
def test_decide_gives_up_at_once_on_what_comes_again(error):
    failure = raised(error=error.__name__, exit_code=error.exit_code)
    decision = POLICY.decide([], failure)
    assert decision.action is Action.GIVE_UP
    assert type(give_up_error(failure, decision.reason)) is error


def test_give_up_error_has_the_exit_code_of_the_workers_when_the_error_is_any_other():
    error = give_up_error(raised(), "spent")
    assert type(error) is WorkerError and error.exit_code == 4
    assert "rank 1 raised ValueError: bad; spent" in str(error)


def test_cause_names_rank_and_kind():
    assert died().cause == "rank 1 died: SIGKILL"
    assert died(rank=-1).cause == "a worker died: SIGKILL"


def test_connections_that_others_broke_are_no_mistake_of_the_training_code():
    policy = FailurePolicy(max_failures=100)
    lost = raised(error="CommunicationError")
    assert policy.decide([lost] * 5, lost).action is Action.RESTART
