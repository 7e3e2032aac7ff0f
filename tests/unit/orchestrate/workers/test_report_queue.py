from raymega.events import StepFinished
from raymega.messages import Progress, Requests, Working
from raymega.orchestrate.workers.report_queue import ReportQueue


def step(number):
    return StepFinished(step=number, metrics={})


def beat(number):
    return Progress(rank=1, step=number)


def test_take_returns_reports_in_order_and_once():
    queue = ReportQueue()
    for number in (1, 2):
        queue.report(step(number))
    assert queue.drain(0.0) == [step(1), step(2)]
    assert queue.drain(0.0) == []


def test_take_keeps_only_the_newest_progress():
    queue = ReportQueue()
    for number in (1, 2, 3):
        queue.report(beat(number))
    assert queue.drain(0.0) == [beat(3)]


def test_take_has_one_sign_of_life_and_never_instead_of_a_step():
    queue, alive = ReportQueue(), Working(rank=1)
    for report in (alive, alive):
        queue.report(report)
    assert queue.drain(0.0) == [alive] and queue.drain(0.0) == []
    for report in (beat(1), alive):
        queue.report(report)
    assert queue.drain(0.0) == [beat(1)]
    for report in (alive, beat(2)):
        queue.report(report)
    assert queue.drain(0.0) == [beat(2)]


def test_close_drops_later_reports_and_waits_for_nobody():
    queue = ReportQueue()
    queue.close()
    queue.report(step(1))
    assert queue.drain(60.0) == []


def test_requests_are_the_last_ones_set():
    queue = ReportQueue()
    assert queue.requests() == Requests()
    queue.set_requests(Requests(stop=True))
    assert queue.requests().stop


def test_save_is_wished_for_once_and_a_stop_for_good():
    queue = ReportQueue()
    queue.set_requests(Requests(stop=True, save=True))
    assert queue.requests() == Requests(stop=True, save=True)
    assert queue.requests() == Requests(stop=True)
