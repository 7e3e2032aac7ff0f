import json
from dataclasses import replace

import pytest

from raymega.errors import ConfigError, StorageError
from raymega.orchestrate.core.failure_policy import Failure, FailureKind
from raymega.orchestrate.run_store.journal import (
    JOURNAL,
    MAX_ENTRIES,
    RECORD_KEY,
    AttemptRecord,
    Journal,
    RunHistory,
    StateChange,
    entry_key,
    open_record,
    read_history,
    read_record,
    write_record,
)
from raymega.orchestrate.run_store.run_identity import precision_faults
from tests.support.fakes import FakeClock, InlineExecutor
from tests.support.jobs import make_test_plan
from tests.support.leases import take_lease
from tests.support.memory_store import MemoryStore

NOW = "2026-01-01T00:00:00"


def make_job(*overrides):
    return make_test_plan(*overrides).job


@pytest.fixture
def store():
    store = MemoryStore()
    write_record(store, open_record(store, make_job(), now=NOW))
    return store


def test_open_record_begins_a_run_without_writing():
    store = MemoryStore()
    record = open_record(store, make_job(), now=NOW)
    assert (record.name, record.num_attempts, record.total_steps) == ("verify", 0, 20)
    assert record.identity["run"] == {"seed": 1234}
    assert read_record(store) is None


def test_open_record_goes_on_with_the_stored_run(store):
    again = open_record(store, make_job("run.steps=50", "parallel.tp=2"), now="later")
    assert again.run_id == read_record(store).run_id
    assert (again.total_steps, again.updated) == (50, "later")


@pytest.mark.parametrize(
    "override",
    ["model.hidden_size=64", "run.seed=1", "data.seq_len=16", "data.global_batch_size=8"],
)
def test_open_record_refuses_another_run_of_the_same_name(store, override):
    path, _, value = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        open_record(store, make_job(override), now=NOW)
    (fault,) = caught.value.faults
    assert fault.fact == f"{path}={value}"
    assert f"was begun with {path}=" in fault.rule


def test_record_without_a_field_is_of_a_run_with_its_default(store):
    """As a build leaves it that does not know the field yet."""
    stored = json.loads(store.get(RECORD_KEY))
    for field in ("packing", "packing_window", "batch_ramp"):
        del stored["identity"]["data"][field]
    store.put(RECORD_KEY, [json.dumps(stored).encode()], overwrite=True)
    assert open_record(store, make_job(), now=NOW).run_id == stored["run_id"]
    with pytest.raises(ConfigError) as caught:
        open_record(store, make_job("data.packing=best_fit"), now=NOW)
    (fault,) = caught.value.faults
    assert (
        fault.fact == "data.packing='best_fit'" and "begun with data.packing='none'" in fault.rule
    )


def test_open_record_reports_every_change_at_once(store):
    with pytest.raises(ConfigError) as caught:
        open_record(store, make_job("run.seed=1", "model.hidden_size=64"), now=NOW)
    assert [fault.fact for fault in caught.value.faults] == ["model.hidden_size=64", "run.seed=1"]


def test_open_record_welcomes_what_does_not_change_the_run(store):
    changes = ("parallel.dp=2", "optimizer.lr=1e-4", "checkpoint.every=5", "elastic.max_failures=9")
    assert open_record(store, make_job(*changes), now=NOW).num_attempts == 0


def test_a_run_may_share_out_the_work_of_its_vision_tower_anew():
    store = MemoryStore()
    tower = "{kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 8, num_heads: 2, ffn_hidden_size: 8, image_token_id: 99"
    write_record(store, open_record(store, make_job(f"model.vision={tower}}}"), now=NOW))
    changed = f"model.vision={tower}, tensor_parallel: true, image_share: 0.2}}"
    assert open_record(store, make_job(changed, "parallel.tp=2"), now=NOW).num_attempts == 0
    with pytest.raises(ConfigError, match=r"model\.vision\.image_token_id=98"):
        open_record(store, make_job(f"model.vision={tower.replace('99', '98')}}}"), now=NOW)


def test_read_record_is_the_inverse_of_write_record(store):
    record = read_record(store)
    write_record(store, record)
    assert read_record(store) == record


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_damaged_record_of_a_run_that_has_nothing_else_is_none(text, caplog):
    store = MemoryStore()
    store.put(RECORD_KEY, [text.encode()], overwrite=True)
    assert read_record(store) is None
    assert f"run.json is damaged at byte {1 if text == '{' else 0} of {len(text)}" in caplog.text


def test_read_record_refuses_another_version(store):
    values = json.loads(store.get(RECORD_KEY)) | {"version": 2}
    store.put(RECORD_KEY, [json.dumps(values).encode()], overwrite=True)
    with pytest.raises(StorageError, match="version 2"):
        read_record(store)


def entry(attempt, *, state="running", num_failures=0):
    died = Failure(kind=FailureKind.DIED, rank=1, step=3, message="gone")
    return AttemptRecord(
        attempt=attempt,
        grid={"tp": attempt},
        world_size=attempt,
        num_micro_batches=1,
        spares=0,
        restored="",
        state=state,
        failures=(died,) * num_failures,
        turns=(StateChange(at=NOW, state=state, step=3, reason="so"),),
    )


def put(store, *entries):
    for each in entries:
        store.put(each.key, [each.to_json()], overwrite=True)


def test_past_is_what_drivers_left_that_were_torn_away(store):
    assert read_history(store) == RunHistory()
    put(store, entry(1, num_failures=2), entry(2, num_failures=1))
    past = read_history(store)
    assert len(past.failures) == 3 and past.num_workers == 2
    assert past.failures[0] == entry(1, num_failures=1).failures[0]


@pytest.mark.parametrize("state", ["finished", "failed", "preempted"])
def test_past_begins_behind_the_last_good_end(store, state):
    put(store, entry(1, num_failures=2), entry(2, state=state, num_failures=1))
    assert read_history(store) == RunHistory()
    put(store, entry(3, num_failures=1))
    assert len(read_history(store).failures) == 1


def test_entry_that_cannot_be_read_is_passed_over(store):
    put(store, entry(1, num_failures=1), entry(2))
    store.put("journal/000003.json", [b"{"], overwrite=True)
    assert len(read_history(store).failures) == 1


@pytest.mark.parametrize(
    ("saved", "now", "is_refused"),
    [
        ("float64", "float32", True),
        ("float64", "bfloat16", True),
        ("float32", "bfloat16", False),
        ("float32", "float64", False),
        ("bfloat16", "float32", False),
    ],
)
def test_run_does_not_drop_digits_of_its_masters(saved, now, is_refused):
    job = make_test_plan(f"precision.dtype={now}").job
    assert bool([*precision_faults({"precision": {"dtype": saved}}, job)]) is is_refused


SOURCES = "data.sources=[{path: synthetic:a, weight: %s}, {path: synthetic:b, weight: %s}]"
STAGE = "{from_tokens: %d, sources: [{path: synthetic:a}]}"


def _begun(store, *overrides, step):
    """The record of a run that has saved ``step``, 16 sequences of 32 tokens each."""
    record = open_record(store, make_job("data.path=none", *overrides), now=NOW)
    write_record(store, replace(record, step=step))


def _goes_on(store, *overrides):
    return open_record(store, make_job("data.path=none", *overrides), now=NOW)


def test_run_keeps_its_blend():
    store = MemoryStore()
    _begun(store, SOURCES % (0.6, 0.4), step=4)
    _goes_on(store, SOURCES % (3, 2))  # the same shares
    with pytest.raises(ConfigError, match=r"data\.content=\[\['synthetic:a', 7\]"):
        _goes_on(store, SOURCES % (0.7, 0.3))
    # epochs, validation sets and run length are no part of what was read
    more = ["data.validation=[{name: x, path: synthetic}]", "run.steps=40"]
    limited = SOURCES.replace("path: synthetic:a", "path: synthetic:a, max_epochs: 2")
    _goes_on(store, limited % (6, 4), *more)


def test_stages_ahead_of_a_run_may_change_and_those_behind_may_not():
    """Step 4 is sample 64, token 2,048."""
    store, blend = MemoryStore(), SOURCES % (0.6, 0.4)
    _begun(store, blend, step=4)
    added = _goes_on(store, blend, f"data.stages=[{STAGE % 2048}]")
    with pytest.raises(ConfigError, match=r"data\.stages=\[\[63, "):
        _goes_on(store, blend, f"data.stages=[{STAGE % 2016}]")
    # once the run has passed the new stage, that is fixed too
    write_record(store, replace(added, step=5))
    with pytest.raises(ConfigError, match=r"data\.stages=\[\]"):
        _goes_on(store, blend)
    _goes_on(store, blend, f"data.stages=[{STAGE % 2048}, {STAGE % 9000}]")


def test_records_that_no_driver_reads_are_deleted():
    store, clock = MemoryStore(), FakeClock()
    lease = take_lease(store, clock)
    journal = Journal(make_job(), lease=lease, executor=InlineExecutor(), clock=clock)
    plan, state = make_test_plan(), journal.first_state()
    for attempt in range(1, MAX_ENTRIES + 20):
        journal.begin(plan, replace(state, attempt=attempt), restored="", spares=0)
    kept = sorted(store.list(JOURNAL))
    assert len(kept) == MAX_ENTRIES
    assert kept[-1] == entry_key(MAX_ENTRIES + 19) and kept[0] == entry_key(20)


def test_driver_that_lost_the_run_deletes_no_record():
    store, clock = MemoryStore(), FakeClock()
    first, attempt = take_lease(store, clock), MAX_ENTRIES + 1
    journal = Journal(make_job(), lease=first, executor=InlineExecutor(), clock=clock)
    for number in range(1, attempt):
        store.put(entry_key(number), [b"{}"], overwrite=True)
    take_lease(store, clock).begin_attempt()
    journal.begin(
        make_test_plan(), replace(journal.first_state(), attempt=attempt), restored="", spares=0
    )
    assert len(list(store.list(JOURNAL))) == attempt
