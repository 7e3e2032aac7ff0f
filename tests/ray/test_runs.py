"""Whole runs on a Ray cluster of three nodes, as a user starts them: kill, resume, stop, refuse."""

import json
import signal

import pytest
from ray.cluster_utils import Cluster

from raymega.checkpoint.tools.inspection import open_checkpoint, verify_checkpoints
from tests.support.command import VERIFY, Outcome, Running, raymega, train

pytestmark = pytest.mark.ray

STEPS = 12
KILL_STEP = 8
LIMIT = 1e-9


@pytest.fixture(scope="module")
def address():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def _settings(store, name: str, *more: str) -> list[str]:
    return [
        f"run.name={name}",
        f"checkpoint.uri={store}",
        f"run.steps={STEPS}",
        "run.eval_samples=4",
        "checkpoint.every=3",
        "optimizer.lr_decay_steps=100",
        "tracking.mlflow_uri=off",
        "parallel.tp=2",
        "parallel.pp=1",
        *more,
    ]


@pytest.fixture(scope="module")
def undisturbed(address, store) -> Outcome:
    """tp2, never touched, and the one that counts norms and activations, which changes no bit."""
    statistics = ("tracking.norms_every=2", "tracking.activations_every=3")
    outcome = train(*_settings(store, "undisturbed", *statistics), address=address)
    assert outcome.code == 0, outcome.stderr
    return outcome


def _once(action):
    """Call ``action`` at the first sight of KILL_STEP."""
    done = []

    def on_step(running: Running, step: int) -> None:
        if step == KILL_STEP and not done:
            done.append(step)
            action(running)

    return on_step


def test_run_reports_every_step_once_and_its_end(undisturbed):
    assert [event["step"] for event in undisturbed.all("step")] == list(range(1, STEPS + 1))
    assert undisturbed.events[-1]["event"] == "finished"
    assert undisturbed.events[-1]["checkpoint_uri"]
    assert [event["step"] for event in undisturbed.all("checkpoint")] == [3, 6, 9, 12]
    assert {event["grid"]["tp"] for event in undisturbed.all("step")} == {2}


def test_statistics_are_reported_in_their_steps(undisturbed):
    for event in undisturbed.all("step"):
        assert ("group_grad_norm/attention.q" in event) == (event["step"] % 2 == 0)
        assert ("output_grad_std/3" in event) == (event["step"] % 3 == 0)


@pytest.mark.wide
def test_a_run_says_how_wrong_its_prediction_was(undisturbed, store, tmp_path):
    told = raymega("plan", "--calibrate", str(store / "undisturbed"), "--gpu", "cpu", "--json")
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    (layout,) = shown["layouts"]
    assert layout["grid"]["tp"] == 2 and layout["steps"] == STEPS - 2
    before, after = (abs(layout[k] / layout["measured_s"] - 1) for k in ("predicted_s", "fitted_s"))
    assert after < min(before, 0.1)
    fitted = tmp_path / "fitted.yaml"
    fitted.write_text(shown["accelerator"])
    again = raymega(
        "plan", "--calibrate", str(store / "undisturbed"), "--gpu", str(fitted), "--json"
    )
    (layout,) = json.loads(again.stdout)["layouts"]
    assert layout["predicted_s"] == pytest.approx(layout["measured_s"], rel=0.1)


@pytest.mark.wide
def test_killed_worker_is_replaced_and_the_losses_are_bit_equal(address, store, undisturbed):
    outcome = train(
        *_settings(store, "killed"), address=address, on_step=_once(lambda r: r.kill_worker(1))
    )
    assert outcome.code == 0, outcome.stderr
    (recovered,) = outcome.all("recovered")
    assert recovered["rank"] == 1
    (failure,) = outcome.all("failure")
    assert "died" in failure["cause"], "seen as a death, long before a deadline"
    assert outcome.losses == undisturbed.losses
    attempts = [event["attempt"] for event in outcome.all("attempt")]
    assert attempts == [1, 2]
    final = undisturbed.all("step")[-1]["tokens"]
    assert outcome.all("step")[-1]["tokens"] == final


@pytest.mark.wide
def test_killed_driver_is_continued_by_the_same_command_on_another_grid(
    address, store, undisturbed
):
    first = train(
        *_settings(store, "orphan"),
        address=address,
        on_step=_once(lambda r: r.signal_driver(signal.SIGKILL)),
    )
    assert first.code == -signal.SIGKILL
    again = train(*_settings(store, "orphan", "parallel.tp=1", "parallel.pp=2"), address=address)
    assert again.code == 0, again.stderr
    steps = [event["step"] for event in again.all("step")]
    assert steps[0] in (4, 7) and steps == list(range(steps[0], STEPS + 1))
    for step in steps:
        assert again.losses[step] == pytest.approx(undisturbed.losses[step], rel=LIMIT)


@pytest.mark.wide
def test_interrupted_run_saves_exits_75_and_continues(address, store, undisturbed):
    first = train(
        *_settings(store, "stopped"),
        address=address,
        on_step=_once(lambda r: r.signal_driver(signal.SIGINT)),
    )
    assert first.code == 75, first.stderr
    saved = first.all("checkpoint")[-1]["step"]
    assert saved == first.all("step")[-1]["step"] < STEPS
    again = train(*_settings(store, "stopped"), address=address)
    assert again.code == 0, again.stderr
    assert first.losses | again.losses == undisturbed.losses


def test_finished_run_says_so_and_starts_nothing(address, store, undisturbed):
    done = train(*_settings(store, "undisturbed"), address=address)
    assert done.code == 0 and done.all("step") == []
    assert done.events[-1]["event"] == "finished" and done.events[-1]["step"] == STEPS
    assert len({e["run_id"] for o in (undisturbed, done) for e in o.all("finished")}) == 1


@pytest.mark.wide
def test_more_steps_continue_a_finished_run(address, store, undisturbed):
    more = train(*_settings(store, "undisturbed", f"run.steps={STEPS + 2}"), address=address)
    assert more.code == 0, more.stderr
    assert [event["step"] for event in more.all("step")] == [STEPS + 1, STEPS + 2]
    assert len({e["run_id"] for o in (undisturbed, more) for e in o.all("finished")}) == 1


@pytest.mark.wide
def test_save_that_is_still_being_written_lets_the_next_be_skipped(address, store, undisturbed):
    """A worker may write 200 kB a second of its 540 kB; the last save is waited for."""
    slow = ("checkpoint.every=1", "checkpoint.when_busy=skip", "checkpoint.bytes_per_s=200000")
    outcome = train(*_settings(store, "slow", *slow), address=address)
    assert outcome.code == 0, outcome.stderr
    saved = [event["step"] for event in outcome.all("checkpoint")]
    skipped = [event["step"] for event in outcome.all("save_skipped")]
    assert saved[-1] == STEPS and skipped, "every step is saved or skipped"
    assert sorted(saved + skipped) == list(range(1, STEPS + 1))
    assert all(event["save_s"] > 2.0 for event in outcome.all("checkpoint"))
    shares = [event["written_bytes"] / event["num_bytes"] for event in outcome.all("save_progress")]
    assert shares and all(0 < share <= 1 for share in shares)
    assert outcome.losses == undisturbed.losses


@pytest.mark.wide
def test_run_goes_on_from_the_files_on_its_own_node(address, store, undisturbed, tmp_path):
    near = f"checkpoint.local_uri={tmp_path}"
    first = train(*_settings(store, "near", near, "run.steps=6"), address=address)
    assert first.code == 0, first.stderr
    files = [path for path in tmp_path.rglob("*.safetensors") if path.is_file()]
    assert len(files) == 2 * 2 and {path.parts[-4] for path in files} == {"near"}
    (flipped,) = [path for path in files if path.match("step-00000006/*-rank00000.safetensors")]
    flipped.write_bytes(flipped.read_bytes()[:-8] + bytes(8))
    again = train(*_settings(store, "near", near), address=address)
    assert again.code == 0 and len(again.all("attempt")) == 1, again.stderr
    assert first.losses | again.losses == undisturbed.losses
    logs = [store / "near" / "logs" / f"rank-{rank:05d}.log" for rank in range(2)]
    assert "the local copy is not used" in logs[0].read_text()


@pytest.mark.wide
def test_checkpoints_are_kept_by_the_rules_of_the_job(address, store):
    rules = ("run.eval_every=3", "checkpoint.keep_last=1", "checkpoint.keep_every=6",
             "checkpoint.keep_best=1", "optimizer.lr=0.3")  # fmt: skip
    outcome = train(*_settings(store, "kept", *rules), address=address)
    assert outcome.code == 0, outcome.stderr
    losses = {event["step"]: event["loss"] for event in outcome.all("evaluation")}
    best = min(losses, key=losses.get)
    kept = [each.step for each in verify_checkpoints(str(store / "kept"))]
    assert kept == sorted({6, 12, best}, reverse=True)
    _, manifest = open_checkpoint(str(store / "kept"))
    assert manifest.metrics["eval/loss"] == losses[STEPS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change", ["run.seed=7", "model.hidden_size=64", "data.global_batch_size=8"], ids=lambda c: c
)
def test_changed_model_seed_or_data_is_refused(address, store, undisturbed, change):
    assert undisturbed.code == 0
    outcome = train(*_settings(store, "undisturbed", change), address=address)
    assert outcome.code == 2 and outcome.events == []
    assert change.partition("=")[0] in outcome.stderr


def test_cluster_without_room_is_exit_3(address, store):
    outcome = train(
        *_settings(
            store,
            "large",
            "parallel.dp=2",
            "cluster.cpus_per_worker=1",
            "cluster.capacity_timeout_s=1",
        ),
        address=address,
    )
    assert outcome.code == 3, outcome.stderr
    assert "cluster.cpus_per_worker" in outcome.stderr


def test_dry_run_plans_checks_the_cluster_and_starts_nothing(address, store):
    settings = [
        word for pair in _settings(store, "dry", "parallel.dp=2") for word in ("--set", pair)
    ]
    command = ["train", str(VERIFY), "--dry-run", "--address", address, *settings]
    fits = raymega(*command)
    assert fits.returncode == 0, fits.stderr
    assert "grid tp2-dp2: 4 workers" in fits.stdout
    too_large = raymega(*command, "--set", "cluster.cpus_per_worker=1")
    assert too_large.returncode == 3 and "cluster.cpus_per_worker" in too_large.stderr
    assert not (store / "dry").exists()


@pytest.mark.wide
def test_loss_that_is_no_number_is_exit_5(address, store):
    outcome = train(*_settings(store, "wild", "optimizer.lr=1e200"), address=address)
    assert outcome.code == 5, outcome.stderr
    assert outcome.stderr.count("Traceback") == 1, "the cause is shown once, not once a rank"


RAMP = (
    "data.batch_ramp="
    "[{until_samples: 10, global_batch_size: 4}, {until_samples: 38, global_batch_size: 7}]"
)
HALF = ("precision.dtype=float16", "precision.loss_scale=16777216.0")
PLACE = ("samples", "global_batch_size", "loss_scale", "skipped_steps", "lr")


def _places(outcome: Outcome, keys: tuple[str, ...] = PLACE) -> dict[int, tuple]:
    return {event["step"]: tuple(event[key] for key in keys) for event in outcome.all("step")}


@pytest.mark.wide
def test_float16_run_in_mid_ramp_goes_on_exactly(address, store):
    """Stopped after step 4, in the ramp's second stage while the loss scale still sinks; and again.

    On another grid the position is the same too. Which gradient still overflows at the edge of the
    range is not: partial sums of tensor-parallel ranks are float16.
    """

    def steps(name, number, *grid):
        last = f"run.steps={number}"
        outcome = train(*_settings(store, name, RAMP, *HALF, last, *grid), address=address)
        assert outcome.code == 0, outcome.stderr
        return outcome

    whole, part, same = steps("whole", 12), steps("parts", 4), steps("parts", 8)
    known = {step: place for step, place in _places(whole).items() if step <= 8}
    assert _places(part) | _places(same) == known
    assert part.losses | same.losses == {step: whole.losses[step] for step in known}
    assert known[4][3] == 4.0 < known[8][3], "the scale had not settled where the run was stopped"
    other = steps("parts", 12, "parallel.tp=1", "parallel.dp=3")
    position = ("samples", "global_batch_size")
    expected = _places(whole, position)
    assert _places(other, position) == {step: expected[step] for step in range(9, 13)}
    assert [size for _, size in expected.values()] == [4.0] * 3 + [7.0] * 4 + [16.0] * 5
    for step, loss in other.losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=2e-2)


@pytest.mark.wide
def test_float16_that_overflows_at_the_least_scale_is_exit_5(address, store):
    least = ("precision.dtype=float16", "precision.loss_scale=1e9", "precision.min_loss_scale=1e9")
    outcome = train(*_settings(store, "least", *least), address=address)
    assert outcome.code == 5, outcome.stderr
    assert "min_loss_scale=1e+09" in outcome.stderr
