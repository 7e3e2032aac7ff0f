"""Saves on request: seen once, answered by the first save that is newer, never left behind."""

import json

import pytest

from raymega.errors import ConfigError, StorageError
from raymega.orchestrate.driver import save_requests
from raymega.orchestrate.driver.save_requests import (
    ANSWERS,
    LOOK_EVERY_S,
    REQUESTS,
    SaveRequests,
    ask_for_save,
)
from raymega.orchestrate.run_store.journal import RunRecord, write_record
from raymega.orchestrate.run_store.run_identity import identity_of
from tests.support.fakes import FakeClock, InlineExecutor, PatientExecutor
from tests.support.jobs import make_test_plan
from tests.support.memory_store import MemoryStore


def _record(status):
    return RunRecord(
        run_id="r",
        name="n",
        identity=identity_of(make_test_plan().job),
        status=status,
        step=4,
        total_steps=9,
        updated="",
    )


@pytest.fixture
def store():
    store = MemoryStore()
    write_record(store, _record("running"))
    return store


def _ask(store, name):
    store.put(f"{REQUESTS}{name}.json", [b"{}"], overwrite=False)


def _answer(store, name):
    return json.loads(store.get(f"{ANSWERS}{name}.json"))


def test_request_is_seen_once_and_answered_by_a_save_after_it(store):
    clock = FakeClock()
    requests = SaveRequests(store, InlineExecutor(), clock)
    assert not requests.has_new(5)
    _ask(store, "a")
    assert not requests.has_new(5), "between looks nothing is listed"
    clock.advance(LOOK_EVERY_S)
    assert requests.has_new(5)
    clock.advance(LOOK_EVERY_S)
    assert not requests.has_new(6)
    requests.answer(5, uri="of the step before the request")
    assert list(store.list(ANSWERS)) == []
    requests.answer(6, uri="u")
    assert _answer(store, "a") == {"step": 6, "uri": "u", "error": ""}
    assert list(store.list(REQUESTS)) == []


def test_look_that_was_under_way_does_not_bring_an_answered_request_back(store):
    clock, executor = FakeClock(), PatientExecutor()
    requests = SaveRequests(store, executor, clock)
    _ask(store, "a")
    requests.has_new(5)
    executor.let_go()
    assert requests.has_new(5)
    clock.advance(LOOK_EVERY_S)
    requests.has_new(5)  # lists the request again
    requests.answer(6, uri="u")
    executor.let_go()
    assert not requests.has_new(6)


def test_next_attempt_sees_a_request_that_the_lost_one_did_not_answer(store):
    clock = FakeClock()
    _ask(store, "a")
    assert SaveRequests(store, InlineExecutor(), clock).has_new(5)
    after = SaveRequests(store, InlineExecutor(), clock)
    assert after.has_new(3)
    after.answer(4, error="disk full")
    assert _answer(store, "a") == {"step": 4, "uri": "", "error": "disk full"}


def test_store_that_fails_is_looked_at_again_later():
    class Refusing(MemoryStore):
        is_refusing = True

        def list(self, prefix):
            if self.is_refusing:
                raise StorageError("no")
            return super().list(prefix)

    store, clock = Refusing(), FakeClock()
    requests = SaveRequests(store, InlineExecutor(), clock)
    _ask(store, "a")
    assert not requests.has_new(1)
    store.is_refusing = False
    clock.advance(LOOK_EVERY_S)
    assert requests.has_new(1)


class Driver:
    """Answers the one request with step 7 while its asker sleeps for the third time."""

    def __init__(self, store):
        self._store, self.num_sleeps = store, 0

    def sleep(self, _seconds):
        self.num_sleeps += 1
        if self.num_sleeps == 3:
            (key,) = self._store.list(REQUESTS)
            answer = json.dumps({"step": 7, "uri": "u", "error": ""}).encode()
            self._store.put(ANSWERS + key.removeprefix(REQUESTS), [answer], overwrite=True)


def test_asking_waits_for_the_answer_and_leaves_nothing(store):
    driver = Driver(store)
    answer = ask_for_save(store, timeout_s=100, sleep=driver.sleep)
    assert (answer.step, answer.uri, answer.error) == (7, "u", "") and driver.num_sleeps == 3
    assert list(store.list("")) == ["run.json"]


@pytest.mark.parametrize("status", ["finished", "failed", "preempted"])
def test_run_that_is_not_at_work_is_not_asked(store, status):
    write_record(store, _record(status))
    with pytest.raises(ConfigError, match=f"is {status} at step 4"):
        ask_for_save(store, timeout_s=1)
    with pytest.raises(ConfigError, match="was never begun"):
        ask_for_save(MemoryStore(), timeout_s=1)
    assert list(store.list("")) == ["run.json"]


def test_run_that_ends_or_is_silent_is_told_apart(store, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(save_requests, "time", clock)
    with pytest.raises(StorageError, match=r"not answered for 20 s"):
        ask_for_save(store, timeout_s=20, sleep=clock.advance)
    assert clock.now_s == FakeClock().now_s + 20

    def end(_s):
        write_record(store, _record("finished"))

    with pytest.raises(StorageError, match="is finished at step 4"):
        ask_for_save(store, timeout_s=100, sleep=end)
    assert list(store.list("")) == ["run.json"]
