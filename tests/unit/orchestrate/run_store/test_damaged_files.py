"""Each small file of a run, damaged in each way: it is named with its byte, and no checkpoint is lost."""

import json
from datetime import UTC, datetime

import pytest

from raymega.checkpoint.format.manifest import find_restore, list_manifests
from raymega.checkpoint.tools.inspection import list_checkpoints
from raymega.errors import ConfigError, RaymegaError
from raymega.orchestrate.core.failure_policy import Failure, FailureKind
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.driver.checkpoint_committer import CheckpointCommitter
from raymega.orchestrate.driver.restore_point import RestorePoint, Rollback, write_rollback
from raymega.orchestrate.run_store.finished_run import finished_run
from raymega.orchestrate.run_store.journal import Journal, open_record, read_history, read_record
from raymega.orchestrate.run_store.lease import Lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.run_store.list_runs import list_runs
from raymega.report.find import find_run
from raymega.report.page import run_page
from raymega.storage.local import LocalStore
from tests.support.fakes import (
    FakeClock,
    FakeKeeping,
    FakeWorkerGroup,
    FakeWorkers,
    InlineExecutor,
)
from tests.support.jobs import make_test_plan

DURATION_S = 30.0
FILES = (
    "run.json",
    "lease/000001.json",
    "journal/000001.json",
    "rollbacks/a0001.json",
    "checkpoints/step-00000004/manifest-a0001.json",
    "metrics.jsonl",
)
MANIFEST, ROLLBACK = FILES[4], FILES[3]
WHOLE_KINDS = {
    "empty": b"", "blanks": b" \n", "garbage": bytes(range(128, 256)), "null": b"null", "number": b"7",
    "list": b"[]", "no fields": b"{}", "text": b"not JSON\n", "deep": b"[" * 100_000,
}  # fmt: skip
WRONG = (None, 7, "text", [], {}, -1.5, True)


def _lease(store, clock):
    return Lease(
        store, holder=this_process(), duration_s=DURATION_S, clock=clock, sleep=clock.advance,
        knows_gone=lambda _holder: False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The small files of a run with two checkpoints and a rollback, by key."""
    folder, plan, clock = (
        tmp_path_factory.mktemp("whole"),
        make_test_plan("run.steps=4"),
        FakeClock(),
    )
    store = LocalStore(folder)
    lease, executor = _lease(store, clock), InlineExecutor()
    lease.acquire()
    attempt = lease.begin_attempt()
    journal = Journal(plan.job, lease=lease, executor=executor, clock=clock)
    state = RunState(attempt=attempt, step=0, saved_step=0, since_s=0.0, reason="first start")
    journal.begin(plan, state, restored="", spares=0)
    committer = CheckpointCommitter(
        plan=plan, attempt=attempt, store=store, executor=executor, clock=clock
    )
    for step in (2, 4):
        group = FakeWorkerGroup(clock, store, world_size=plan.grid.world_size, script=[])
        for reports in FakeWorkers(plan.grid.world_size, step=step).save():
            group.write_files(reports)
            for report in reports:
                committer.handle_report(report)
    journal.record_failure(Failure(kind=FailureKind.DIED, rank=1, step=2, message="gone"))
    journal.record_state(state.move(State.FAILED, now_s=1.0, reason="so"))
    write_rollback(
        store, Rollback(attempt=1, from_step=3, to_step=2, samples=(32, 48), cause="a spike")
    )
    lease.release()
    lines = [
        {"event": "run", "run_id": "r", "name": plan.job.run.name, "uri": str(folder), "step": 0,
         "is_resumed": False, "total_steps": 4, "job": plan.job.model_dump(mode="json")},
        {"event": "attempt", "step": 0, "attempt": 1, "grid": {"pp": 2}, "source": "nothing", "reason": "first start", "plan": {}},
        {"event": "step", "step": 1, "attempt": 1, "grid": {"pp": 2}, "loss": 2.5, "step_time_s": 0.1},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {key.relative_to(folder).as_posix(): key.read_bytes() for key in folder.rglob("*")
            if key.is_file()}  # fmt: skip


def _whole_damages(whole: bytes):
    """Yield the name and the bytes of each damage of a file as a whole."""
    yield from WHOLE_KINDS.items()
    for share in (1, 2, 3):
        yield f"cut at {share}/4", whole[: len(whole) * share // 4]
    yield "one byte", whole[: len(whole) // 2] + b"\xff" + whole[len(whole) // 2 + 1 :]


def _field_damages(whole: bytes):
    """Yield the name and the bytes of each damage of one field."""
    try:
        values = json.loads(whole)
    except ValueError:  # several lines: damage the fields of the second one
        first, line, *rest = whole.splitlines(keepends=True)
        for field in (values := json.loads(line)):
            for wrong in WRONG:
                changed = json.dumps(values | {field: wrong}).encode() + b"\n"
                yield f"{field}={wrong!r}", b"".join([first, changed, *rest])
        return
    for field in values:
        yield f"without {field}", json.dumps({k: v for k, v in values.items() if k != field}).encode()  # fmt: skip
        # a whole number in place of the version is that of another build, and refused as such
        for wrong in WRONG if field != "version" else WRONG[2:]:
            yield f"{field}={wrong!r}", json.dumps(values | {field: wrong}).encode()


def _put_run(folder, files, key, content):
    for name, whole in (files | {key: content}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(whole)
    return LocalStore(folder)


def _use(store, plan) -> tuple[int, str]:
    """Do what a driver and people do with a run; return the step found, and what was refused."""
    record = open_record(store, plan.job, now=FakeClock().timestamp())
    finished_run(store, record)
    read_history(store)
    lease = _lease(store, FakeClock())
    lease.acquire()
    assert lease.epoch >= 2, "no number of an attempt is used twice"
    place = RestorePoint(store, plan.job, FakeKeeping())
    return place.find(record, saved_step=0), record.run_id


@pytest.mark.parametrize(
    "damages", [_whole_damages, pytest.param(_field_damages, marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("key", FILES)
def test_damaged_file_is_named_and_sound_checkpoints_are_used(
    key, damages, files, tmp_path, caplog
):
    plan = make_test_plan("run.steps=4")
    run_id = json.loads(files["run.json"])["run_id"]
    for number, (kind, content) in enumerate(damages(files[key])):
        store = _put_run(tmp_path / str(number), files, key, content)
        caplog.clear()
        # what people ask
        uri = store.uri
        read_record(store)
        assert [run.name for run in list_runs(uri, now=FakeClock().timestamp())] == [str(number)]
        assert len(list_checkpoints(uri)) == 2, kind
        told = ""
        try:
            run_page(find_run(uri), now=datetime.now(UTC), levels_of=lambda _job: {})
        except ConfigError as error:
            told = str(error)
            assert key == "metrics.jsonl" and "no line is an event" in told
        # what a driver does
        try:
            step, found_id = _use(store, plan)
        except RaymegaError as error:
            told = str(error)
            assert key == ROLLBACK and "rm " in told, f"{kind}: {told}"
        else:
            assert step == (2 if key == MANIFEST and _is_noticed(caplog, key) else 4), kind
            assert found_id == run_id or (key == "run.json" and not _is_noticed(caplog, key)), kind
        told += caplog.text
        if kind in WHOLE_KINDS or "cut" in kind or kind == "one byte":
            assert (key in told and "byte" in told) or (key == "metrics.jsonl" and not content.strip()), (
                f"{kind}: {told}"
            )  # fmt: skip


def _is_noticed(caplog, key) -> bool:
    return any(key in message and "damaged" in message for message in caplog.messages)


def test_record_is_rebuilt_from_the_newest_checkpoint_where_no_attempt_has_a_copy(files, tmp_path):
    store = _put_run(
        tmp_path, {k: v for k, v in files.items() if "journal" not in k}, "run.json", b""
    )
    record = read_record(store)
    whole = json.loads(files["run.json"])
    assert (record.name, record.step, record.identity) == (whole["name"], 4, whole["identity"])
    assert read_record(store).run_id == record.run_id
    # another model is refused as before
    with pytest.raises(RaymegaError, match=r"model\.hidden_size=64"):
        open_record(store, make_test_plan("model.hidden_size=64").job, now="")


def test_damaged_lease_is_waited_for_and_a_live_driver_keeps_the_run(files, tmp_path):
    store, clock = _put_run(tmp_path, files, FILES[1], b""), FakeClock()
    lease, began_s = _lease(store, clock), clock.monotonic()
    lease.acquire()
    assert lease.epoch == 2 and clock.monotonic() - began_s >= DURATION_S
    # a holder at work writes its grant anew while the other one waits
    store = _put_run(tmp_path / "live", files, FILES[1], b"")
    sound = json.loads(files[FILES[1]]) | {"is_released": False}
    renewals = iter(range(100))

    def renew(seconds):
        clock.advance(seconds)
        grant = json.dumps(sound | {"renewals": next(renewals)}).encode()
        store.put(FILES[1], [grant], overwrite=True)

    other = Lease(
        store, holder=this_process(), duration_s=DURATION_S, clock=clock, sleep=renew,
        knows_gone=lambda _holder: False,
    )  # fmt: skip
    clock.now_s = 0.0
    with pytest.raises(RaymegaError, match="has a driver"):
        other.acquire()


def test_checkpoints_stay_listed_without_any_sound_grant(files, tmp_path):
    store = _put_run(tmp_path, files, FILES[1], b"")
    assert len(list_manifests(store)) == 2 and find_restore(store).manifest.step == 4
