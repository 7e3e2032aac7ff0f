"""Tasks of a run: their requests and metrics, and the thread that evaluates them beside it."""

import json
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from raymega.cli.main import app
from raymega.config.load import parse_job
from raymega.errors import CapacityError, ConfigError, NumericsError
from raymega.evaluate import scoring
from raymega.evaluate.plan import plan_beside
from raymega.evaluate.requests import Scores, pack_scores, unpack_requests
from raymega.evaluate.tasks_beside import TasksBesideSink
from raymega.evaluate.training_tasks import TrainingTasks, open_tasks
from raymega.events import CheckpointCommitted, RunFinished, TasksEvaluated
from raymega.messages import EntryOutput
from raymega.plan.validation.registry import job_faults
from raymega.prepare.tokenizer.trained import byte_tokenizer
from tests.support.jobs import VERIFY, make_test_plan

GUARD_S = 100


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lambada.jsonl").write_text('{"text": "a cat sat"}\n{"text": "he had hats"}\n')
    (tmp_path / "text.txt").write_text("some text")
    return tmp_path


@pytest.fixture
def tasks(files, monkeypatch):
    _with_tokenizer(monkeypatch)
    return open_tasks(_job(files))


def _with_tokenizer(monkeypatch):
    from raymega.evaluate import training_tasks

    files = {"tokenizer.json": byte_tokenizer().encode()}
    monkeypatch.setattr(training_tasks, "tokenizer_of_dataset", lambda _path: files)


def _settings(folder, *more):
    lambada = f"{{task: lambada, path: {folder}/lambada.jsonl, name: last}}"
    text = f"{{task: perplexity, path: {folder}/text.txt}}"
    return [f"run.eval_tasks=[{lambada}, {text}]", "model.vocab_size=300", *more]


def _job(folder, *more):
    return parse_job(VERIFY, _settings(folder, *more)).job()


def _scores(requests):
    """A log-probability of -1 for each target; every second request is greedy."""
    return [
        Scores(
            log_probs=np.full(request.num_targets, -1.0),
            is_greedy=np.full(request.num_targets, number % 2 == 0),
        )
        for number, request in enumerate(requests)
    ]


def test_scores_of_all_tasks_become_the_metrics_of_each(tasks):
    requests = unpack_requests(tasks.pack())
    scores = _scores(requests)
    data = pack_scores([s.log_probs for s in scores], [s.is_greedy for s in scores])
    event = tasks.judge_output(EntryOutput(rank=0, step=7, data=data))
    assert event.step == 7
    assert event.metrics["eval/task/last/accuracy"] == 1.0
    assert event.metrics["eval/task/last/accuracy_loose"] == 0.0
    assert event.metrics["eval/task/perplexity/loss"] == 1.0
    assert {name.split("/")[2] for name in event.metrics} == {"last", "perplexity"}
    # the strict and the loose form of a passage have the same tokens, which are read once
    texts = {each.tokens.tobytes(): len(each.tokens) - 1 for each in requests}
    assert tasks.num_tokens == sum(texts.values()) and len(texts) == len(requests) - 2


def test_a_score_that_is_no_number_judges_nothing(tasks, monkeypatch):
    """NaN is no likeliest token, so each would count as wrong. A run proceeds; a command ends."""
    requests = unpack_requests(tasks.pack())
    scores = _scores(requests)
    scores[0].log_probs[-1] = np.nan
    data = pack_scores([s.log_probs for s in scores], [s.is_greedy for s in scores])
    output = EntryOutput(rank=0, step=7, data=data)
    metrics = tasks.judge_output(output).metrics
    assert np.isnan([value for name, value in metrics.items() if "/last/" in name]).all()
    assert metrics["eval/task/perplexity/loss"] == 1.0
    plan = make_test_plan("model.vocab_size=300")
    done = SimpleNamespace(fault=None)
    monkeypatch.setattr(scoring, "run_entry", lambda *_, on_report, **__: on_report(output) or done)
    checkpoint = SimpleNamespace(
        store=SimpleNamespace(uri="runs/a"), manifest=SimpleNamespace(key="step-7")
    )
    with pytest.raises(NumericsError, match=r"of request 1 of \d+ is NaN or Inf"):
        scoring.score(checkpoint, plan, requests, on_rows=lambda *_: None)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["run.eval_tasks=[{task: lambada, path: nowhere}]"], "which is no file"),
        (["model.vocab_size=100"], "has 257 tokens"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_starts(more, told, files, monkeypatch):
    _with_tokenizer(monkeypatch)
    with pytest.raises(ConfigError) as error:
        open_tasks(_job(files, *more))
    assert told in str(error.value)


def test_a_run_without_a_tokenizer_has_no_tasks(files):
    with pytest.raises(ConfigError) as error:
        open_tasks(_job(files))
    assert "has no tokenizer.json" in str(error.value)
    assert open_tasks(parse_job(VERIFY).job()) is None


def test_a_wrong_grid_beside_is_refused(files):
    beside = ("run.eval_tasks_on=beside", "run.eval_tasks_grid=tp=2")
    plan = plan_beside(_job(files, *beside))
    assert plan.grid.tp == 2 and plan.job.run.name == "verify-tasks"
    with pytest.raises(ConfigError) as error:
        plan_beside(_job(files, *beside[:1], "run.eval_tasks_grid=tp=3"))
    assert "parallel.tp=3" in str(error.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["run.eval_tasks=[]", "run.eval_tasks_every=2"], "there is no task to evaluate"),
        (["run.eval_tasks=[{task: race, path: a}, {task: race, path: b}]"], "has race 2 times"),
        (["run.eval_tasks=[{task: wikitext, path: a, stride: 99}]"], "stride=99"),
        (["run.eval_tasks_on=beside", "run.eval_tasks_every=15"], "must be saved"),
        (["run.eval_tasks_grid=tp=2"], "has no effect without run.eval_tasks_on=beside"),
    ],
)
def test_rules_of_the_job_file(more, told, files):
    parsed = parse_job(VERIFY, _settings(files, *more))
    faults = [*parsed.faults, *job_faults(parsed.values)]
    assert [fault for fault in faults if told in str(fault)], faults


@pytest.mark.parametrize(
    ("on", "told"),
    [("grid", "% of training time"), ("beside", "workers beside the run, which does not wait")],
)
def test_a_plan_says_what_an_evaluation_reads_and_takes(on, told, files, monkeypatch):
    _with_tokenizer(monkeypatch)
    settings = _settings(files, "run.eval_tasks_every=10", f"run.eval_tasks_on={on}")
    words = [
        "plan",
        str(VERIFY),
        "--gpu",
        "h100",
        *[w for each in settings for w in ("--set", each)],
    ]
    text = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "evaluation tasks every 10 steps and at the end: last, perplexity" in text
    tokens = open_tasks(_job(files)).num_tokens
    assert f"one evaluation reads {tokens:,} tokens in " in text and told in text
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    costs, bill = found["eval_tasks"], found["prediction"]["bill"]
    assert (
        costs["tokens"] == tokens and costs["seconds"] > 0 and ("share" in costs) == (on == "grid")
    )
    # the bill has the evaluations that training waits for: after 10 and 20 steps
    plain = ["plan", str(VERIFY), "--gpu", "h100", "--set", "model.vocab_size=300", "--json"]
    free = json.loads(CliRunner().invoke(app, plain).output)["prediction"]["bill"]
    waited_s = 2 * costs["seconds"] if on == "grid" else 0.0
    assert bill["evaluation_s"] - free["evaluation_s"] == pytest.approx(
        waited_s, rel=1e-6, abs=1e-12
    )


def test_the_share_of_evaluations_is_of_the_step_that_is_shown(files, monkeypatch):
    """The closed forms take a step of zb_h1 to be longer than its simulation, which is shown."""
    _with_tokenizer(monkeypatch)
    settings = _settings(files, "run.eval_tasks_every=10", "schedule.name=zb_h1")
    words = ["plan", str(VERIFY), "--gpu", "h100", "--json"]
    words += [word for each in settings for word in ("--set", each)]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    costs, step_s = found["eval_tasks"], found["prediction"]["step_time_s"]
    assert costs["share"] == pytest.approx(costs["seconds"] / (costs["seconds"] + 10 * step_s))


def test_a_plan_without_the_files_says_so(files):
    words = ["plan", str(VERIFY), *[w for each in _settings(files) for w in ("--set", each)]]
    text = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert (
        "what they read is not known here (run.eval_tasks, and the dataset synthetic has no" in text
    )


class _Workers:
    """Workers that wait for the test before each answer, and fail at some steps."""

    def __init__(self, tasks, *, failing=()):
        self.asked, self.is_closed = [], False
        self.began, self.may_answer = Event(), Event()
        self._tasks, self._failing = tasks, failing

    def score(self, uri):
        self.asked.append(uri)
        self.began.set()
        assert self.may_answer.wait(GUARD_S)
        if uri in self._failing:
            raise CapacityError("no room for 1 worker")
        return _scores(self._tasks.requests)

    def close(self):
        self.is_closed = True


class _Heard:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def close(self, timeout_s):
        """Nothing is open."""


def _committed(step):
    return CheckpointCommitted(
        attempt=3, step=step, uri=str(step), stall_s=0.0, save_s=0.0, num_bytes=1
    )


def _finished(status="finished"):
    return RunFinished(status=status, step=8, checkpoint_uri="", goodput=1.0, wall_s=1.0)


def _sink(tasks, workers, heard):
    return TasksBesideSink(
        tasks, start_workers=lambda: workers, is_due=lambda step: step % 2 == 0, watcher=heard
    )


def test_due_checkpoints_are_evaluated_beside_and_the_newest_one_first(tasks, caplog):
    workers, heard = _Workers(tasks, failing=("2",)), _Heard()
    sink = _sink(tasks, workers, heard)
    sink.emit(_committed(1))
    sink.emit(_committed(2))
    assert workers.began.wait(GUARD_S)
    # the evaluation of step 2 is under way: 4 waits, and 6 takes its place
    sink.emit(_committed(4))
    sink.emit(_committed(6))
    assert heard.events == []
    workers.may_answer.set()
    sink.emit(_finished())
    (event,) = heard.events
    assert isinstance(event, TasksEvaluated) and (event.step, event.attempt) == (6, 3)
    assert workers.asked == ["2", "6"] and workers.is_closed
    assert "the tasks of step 4 are left out: step 6 is newer" in caplog.text
    assert "the tasks of step 2 were not evaluated: no room for 1 worker" in caplog.text
    sink.close(1.0)


def test_a_run_that_is_stopped_waits_for_no_evaluation(tasks):
    workers, heard = _Workers(tasks), _Heard()
    sink = _sink(tasks, workers, heard)
    sink.emit(_committed(2))
    assert workers.began.wait(GUARD_S)
    sink.emit(_committed(4))
    sink.emit(_finished("preempted"))
    assert heard.events == []
    workers.may_answer.set()
    sink.close(GUARD_S)
    assert workers.asked == ["2"]


def test_results_come_with_the_next_event(tasks):
    workers, heard = _Workers(tasks), _Heard()
    workers.may_answer.set()
    sink = _sink(tasks, workers, heard)
    sink.emit(_committed(2))
    sink.emit(_finished())
    assert [event.step for event in heard.events] == [2]
    assert json.dumps(dict(heard.events[0].metrics))
    assert isinstance(tasks, TrainingTasks)
