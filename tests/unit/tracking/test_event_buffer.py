from raymega.tracking.event_buffer import EventBuffer, Stamped
from tests.unit.tracking.events import attempt_started, run_started, step_finished


def spool_of(*events, max_events=100):
    spool = EventBuffer(max_events)
    for event in events:
        spool.put(Stamped(time_s=0.0, event=event))
    return spool


def events_of(batch):
    return [item.event for item in batch]


def test_take_groups_steps_up_to_the_limit_and_nothing_else():
    first, start, steps = run_started(), attempt_started(1), [step_finished(n) for n in (1, 2, 3)]
    again = attempt_started(2)
    spool = spool_of(first, start, *steps, again)
    taken = [events_of(spool.pop(2)) for _ in range(6)]
    assert taken == [[first], [start], steps[:2], steps[2:], [again], []]


def test_give_back_restores_the_order():
    events = [step_finished(n) for n in (1, 2, 3, 4)]
    spool = spool_of(*events)
    spool.give_back(spool.pop(2))
    assert events_of(spool.pop(10)) == events


def test_full_spool_drops_the_oldest_steps_and_counts_them():
    first, start = run_started(), attempt_started(1)
    steps = [step_finished(n) for n in range(1, 9)]
    spool = spool_of(first, start, *steps, max_events=5)
    assert len(spool) == 5
    assert spool.num_dropped == 5
    assert events_of(spool.pop(9) + spool.pop(9)) == [first, start]
    assert events_of(spool.pop(9)) == steps[5:]


def test_full_spool_keeps_what_is_not_a_step_beyond_its_bound():
    starts = [attempt_started(n) for n in range(1, 5)]
    spool = spool_of(*starts, max_events=2)
    assert len(spool) == 4
    assert spool.num_dropped == 0
