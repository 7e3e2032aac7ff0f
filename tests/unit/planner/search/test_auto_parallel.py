"""Layouts that the planner chooses: what a file states is held, the rest is the search's best."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from raymega.api import load_chosen, load_job
from raymega.errors import ConfigError, PlanError
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import job_values
from raymega.plan.validation.registry import job_faults
from raymega.planner.search.selection import best_grid

JOBS = Path(__file__).parents[4] / "jobs"
FILE = """
run: {name: chosen, steps: 5}
model: {family: llama, num_layers: 4, hidden_size: 64, num_heads: 4, ffn_hidden_size: 128, vocab_size: 256,
  max_positions: 64}
data: {path: synthetic, seq_len: 64, global_batch_size: 16}
parallel: auto
optimizer: {lr: 1e-3}
cluster: {device: cpu, num_workers: 4}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    return path


def test_auto_is_resolved_for_all_workers_and_says_why(file):
    job, choice = load_chosen(file)
    assert choice is not None and choice.num_workers == job.cluster.num_workers == 4
    assert not job_faults(job_values(job))
    assert job == choice.job
    text = "\n".join(choice.reasons)
    for part in ("4 x cpu", "the fastest of", "next: ", "memory", "Expect "):
        assert part in text


def test_the_same_file_gives_the_same_layout_and_so_does_what_it_turned_into(file):
    job, choice = load_chosen(file)
    assert load_chosen(file)[0] == job
    given = load_job(file, [*choice.overrides, "parallel.layout=given"])
    assert given.parallel.model_copy(update={"layout": "auto"}) == job.parallel


def test_what_the_job_sets_stays(file):
    held = {"parallel.tp": 2, "schedule.micro_batch_size": 2, "memory.recompute": "full"}
    job, choice = load_chosen(file, [f"{path}={value}" for path, value in held.items()])
    values = job_values(job)
    assert {path: values[path] for path in held} == held
    assert f"held as the job has it: {', '.join(sorted(held))}" in choice.reasons


def test_a_job_with_its_own_layout_is_left_alone(file):
    job, choice = load_chosen(file, ["parallel.layout=given", "parallel.dp=4"])
    assert choice is None and job.parallel.dp == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.num_workers=grid", "set cluster.num_workers"),
        ("cluster.device=cuda", "set cluster.accelerator"),
        ("cluster.accelerator=abacus", "cluster.accelerator abacus"),
        ("optimizer.lr=-1", "optimizer.lr"),
    ],
)
def test_what_auto_needs_is_asked_for(file, override, words):
    with pytest.raises((ConfigError, PlanError), match=words):
        load_job(file, [override])


def test_all_faults_of_a_job_that_leaves_its_layout_open_come_at_once(file):
    with pytest.raises(ConfigError) as caught:
        load_job(file, ["cluster.num_workers=grid", "data.seq_len=128", "optimizer.beta1=2"])
    assert len(caught.value.faults) == 3


def test_a_grid_that_the_nodes_cannot_hold_is_passed_over():
    job = load_job(JOBS / "llama-7b-16gpu.yaml")
    held = ("parallel.pp", "parallel.sharding", "schedule.chunks", "memory.recompute")
    best = partial(best_grid, job, 16, CATALOGUE["h100"], fixed=held)
    free = best().found.plan.grid
    other = best(fits=lambda grid: grid != free).found.plan.grid
    assert other != free and other.world_size == 16
    with pytest.raises(PlanError, match="none of the"):
        best(fits=lambda _: False)


def test_every_number_of_workers_has_a_layout_of_its_own():
    job = load_job(JOBS / "llama-7b-16gpu.yaml")
    for number in (8, 16):
        choice = best_grid(job, number, CATALOGUE["h100"])
        assert choice.num_workers == number == choice.job.cluster.num_workers
        assert choice.job.data == job.data and choice.job.model == job.model
