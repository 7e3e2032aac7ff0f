"""Evaluation tasks of a run, ``run.eval_tasks``: their requests before it starts, their metrics from scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

from raymega.checkpoint.tools.inspection import open_checkpoint, run_of
from raymega.config.schema import EvalTask, Job
from raymega.data.format import TOKENIZER_FILE
from raymega.data.tokenizer_files import tokenizer_of_dataset
from raymega.errors import ConfigError, Fault, RaymegaError, raise_faults
from raymega.evaluate.requests import (
    Request,
    Scores,
    by_tokens,
    pack_requests,
    rows_on_grid,
    score_faults,
    unpack_scores,
)
from raymega.evaluate.tasks.table import TASKS
from raymega.evaluate.tasks.task import Questions, Settings
from raymega.evaluate.tokenizer import ModelTokenizer, find_tokenizer, tokenizer_in
from raymega.events import TasksEvaluated
from raymega.messages import EntryOutput
from raymega.plan.run_plan import RunPlan
from raymega.tracking.names import task_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTasks:
    """Tasks that are evaluated during a run.

    Attributes:
        titles: Name of each task in metrics.
        questions: Requests of each task, and what judges their scores.
    """

    titles: tuple[str, ...]
    questions: tuple[Questions, ...]

    @property
    def requests(self) -> list[Request]:
        """Requests of all tasks, one task after the other."""
        return [request for each in self.questions for request in each.requests]

    def pack(self) -> bytes:
        """Return the requests as workers get them."""
        return pack_requests(self.requests)

    def judge(self, scores: Sequence[Scores], *, step: int) -> TasksEvaluated:
        """Return the metrics of all tasks from the scores of :attr:`requests`, after ``step`` steps."""
        metrics: dict[str, float] = {}
        first = 0
        for title, questions in zip(self.titles, self.questions, strict=True):
            last = first + len(questions.requests)
            found, _samples = questions.judge(scores[first:last])
            if any(score_faults(scores[first:last])):  # an evaluation stops no run
                found = dict.fromkeys(found, nan)
            metrics |= task_metrics(title, found)
            first = last
        return TasksEvaluated(step=step, metrics=metrics)

    def judge_output(self, output: EntryOutput) -> TasksEvaluated:
        """Return the metrics from the scores that a rank has reported."""
        return self.judge(unpack_scores(output.data, self.requests), step=output.step)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that one evaluation reads."""
        requests = self.requests
        return sum(len(requests[numbers[0]].tokens) - 1 for numbers in by_tokens(requests))

    def num_rows(self, plan: RunPlan) -> int:
        """Return the number of rows that one evaluation reads on the grid of ``plan``."""
        return rows_on_grid(self.requests, plan).num_rows


def open_tasks(job: Job) -> TrainingTasks | None:
    """Return the tasks of a run; None for a run without any.

    Raises:
        ConfigError: A file is wrong, or the run's data have no tokenizer that fits.
    """
    if not job.run.eval_tasks:
        return None
    raise_faults(
        ConfigError, [fault for each in job.run.eval_tasks for fault in _file_faults(each)]
    )
    tokenizer = training_tokenizer(job)
    return TrainingTasks(
        titles=tuple(entry.title for entry in job.run.eval_tasks),
        questions=tuple(_questions(entry, tokenizer, job) for entry in job.run.eval_tasks),
    )


def training_tokenizer(job: Job) -> ModelTokenizer:
    """Return the tokenizer of a run's data; else that of the checkpoint from which the run starts.

    Raises:
        ConfigError: There is none, or it has more tokens than the model.
    """
    path = next(iter(job.data.datasets))
    files = tokenizer_of_dataset(path)
    found = (
        _tokenizer_of_data(files, path)
        if TOKENIZER_FILE in files
        else _tokenizer_of_start(job, path)
    )
    if found.vocab_size > job.model.vocab_size:
        raise ConfigError(
            Fault(
                fact=f"run.eval_tasks, and {found.source} has {found.vocab_size:,} tokens",
                rule=f"the model has model.vocab_size={job.model.vocab_size}",
                remedy=f"set model.vocab_size={found.vocab_size} or more",
            )
        )
    return found


def _tokenizer_of_data(files: Mapping[str, bytes], path: str) -> ModelTokenizer:
    try:
        return tokenizer_in(files, f"the dataset {path}")
    except ConfigError as error:
        raise ConfigError(
            Fault(
                fact=f"run.eval_tasks, and {error.faults[0].fact}",
                rule="a task's text is cut by the tokenizer.json of the run's dataset",
                remedy="prepare the dataset anew, or leave run.eval_tasks out",
            )
        ) from error


def _tokenizer_of_start(job: Job, path: str) -> ModelTokenizer:
    start = job.checkpoint.init_from
    try:
        if start != "none":
            return find_tokenizer(open_checkpoint(run_of(start)))
    except RaymegaError as error:
        raise ConfigError(*error.faults) from error
    raise ConfigError(
        Fault(
            fact=f"run.eval_tasks, and the dataset {path} has no tokenizer.json",
            rule="a task's text is cut into the model's tokens",
            remedy="train on a dataset of `raymega data prepare`, or leave run.eval_tasks out",
        )
    )


def _questions(entry: EvalTask, tokenizer: ModelTokenizer, job: Job) -> Questions:
    settings = Settings(
        seq_len=job.data.seq_len, stride=entry.stride, limit=entry.limit, vision=job.model.vision
    )
    questions = TASKS[entry.task](Path(entry.path), tokenizer, settings)
    if not questions.requests:
        fact = f"run.eval_tasks has {entry.title} with path={entry.path!r}, which has nothing to evaluate"
        rule = "a task needs at least one document"
        raise ConfigError(Fault(fact=fact, rule=rule, remedy="give the path of its test set"))
    return questions


def _file_faults(entry: EvalTask) -> list[Fault]:
    if Path(entry.path).is_file():
        return []
    return [
        Fault(
            fact=f"run.eval_tasks has {entry.title} with path={entry.path!r}, which is no file",
            rule="a task reads one file on the driver's machine",
            remedy="give the path of its test set",
        )
    ]
