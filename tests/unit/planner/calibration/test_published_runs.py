"""Published runs as jobs, and predictions held against them; the table is in benchmarks/."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.calibration.comparison import PublishedComparison, compare
from raymega.planner.calibration.published_runs import published_run, read_runs

TABLE = Path(__file__).parents[4] / "benchmarks" / "published_runs.csv"
LONG = TABLE.with_name("published_long_context.csv")
FITTED = ("Narayanan2021-SC21-T1", "Korthikanti2022", "Megatron-LM README images/model_table")


@pytest.fixture(scope="module")
def found() -> list[PublishedComparison]:
    runs = [run for run in read_runs(TABLE) if not run.skipped and run.gpu in CATALOGUE]
    return [compare(run, CATALOGUE[run.gpu]) for run in runs]


def error(each: PublishedComparison) -> float:
    return abs(each.iter_s / each.run.iter_s - 1)


def is_seen(each: PublishedComparison) -> bool:
    return each.run.source.startswith(FITTED)


def test_step_times_of_runs_that_no_constant_was_fitted_to(found):
    errors = [error(each) for each in found if each.run.iter_s and not is_seen(each)]
    assert len(errors) > 50
    assert median(errors) < 0.08
    assert sum(size <= 0.2 for size in errors) >= 0.9 * len(errors)


def test_fewer_than_half_of_the_runs_were_fitted_to(found):
    assert sum(map(is_seen, found)) < len(found) / 2


def test_memory_of_runs_that_print_it_is_within_a_tenth_for_nine_in_ten(found):
    errors = [
        abs(each.memory_gib / each.run.memory_gib - 1) for each in found if each.run.memory_gib
    ]
    assert len(errors) >= 24
    assert sum(size <= 0.1 for size in errors) >= 0.85 * len(errors)


def test_no_run_that_ran_is_refused_for_its_memory_and_every_one_that_did_not_fit_is(found):
    ran = [each for each in found if not each.run.is_out_of_memory]
    assert [each.run.model for each in ran if not each.fits] == []
    failed = [each for each in found if each.run.is_out_of_memory]
    assert failed and [each.run.model for each in failed if each.fits] == []


def test_ways_to_cut_a_model_with_experts_are_ordered_as_published(found):
    by_model: dict[str, list[PublishedComparison]] = {}
    for each in found:
        if each.run.source.startswith("MoE-Parallel-Folding") and each.run.iter_s:
            by_model.setdefault(each.run.model.split(" [")[0], []).append(each)
    assert len(by_model) == 4
    for runs in by_model.values():
        published = sorted(runs, key=lambda each: each.run.iter_s)
        assert sorted(runs, key=lambda each: each.iter_s) == published
        assert len(runs) >= 3
        assert all(error(each) < (0.3 if "FSDP" in each.run.model else 0.25) for each in runs)


def test_sharded_parameters_that_are_gathered_tensor_by_tensor_are_slower_on_more_gpus(found):
    """ZeRO-3 on 384 to 2,240 GPUs, where twice the GPUs bring little."""
    runs = [each for each in found if "ZeRO-3" in each.run.model]
    assert len(runs) == 6
    assert sum(error(each) <= 0.2 for each in runs) >= 5 and max(map(error, runs)) < 0.4


def test_context_parallelism_of_a_source_that_was_looked_up_after_its_cost_was_built():
    """1 to 16 ranks of a sequence of up to a million tokens, on a GPU that no run had been compared for."""
    runs = [run for run in read_runs(LONG) if run.gpu == "b200"]
    found = [compare(run, CATALOGUE["b200"]) for run in runs]
    assert sorted({each.plan.grid.cp for each in found}) == [1, 2, 4, 8, 16]
    assert max(map(error, found)) < 0.08
    times = [each.iter_s for each in found]
    assert sorted(times, reverse=True) == times, "as published"


def test_a_system_whose_source_says_what_it_does_again_is_predicted_without_a_constant_of_its_own():
    """torchtitan without cp: FSDP, with tensor parallelism, with a pipeline; compiled or not; in fp8 or not."""
    runs = [run for path in (TABLE, LONG) for run in read_runs(path)]
    mine = [run for run in runs if run.source.startswith("torchtitan") and not run.skipped]
    found = [compare(run, CATALOGUE[run.gpu]) for run in mine if run.candidates[0].grid.cp == 1]
    assert len(found) == 12
    assert median(map(error, found)) < 0.08 and max(map(error, found)) < 0.2


def test_pipelines_of_a_source_have_the_micro_batches_that_its_default_gives_them():
    (plain, interleaved) = (
        run for run in read_runs(LONG) if "405B" in run.model and not run.skipped
    )
    for run, chunks in ((plain, 1), (interleaved, 2)):
        (plan,) = run.candidates
        assert plan.batch.num_micro_batches == 8 and plan.placement.chunks == chunks


def test_schedules_of_one_model_are_ordered_as_published(found):
    by_model: dict[tuple[str, int], list[PublishedComparison]] = {}
    for each in found:
        if each.run.source.startswith("ZeroBubble"):
            name = each.run.model.split(" [")[0], each.plan.batch.global_batch_size
            by_model.setdefault(name, []).append(each)
    assert len(by_model) == 6
    for runs in by_model.values():
        fastest = min(runs, key=lambda each: each.run.iter_s)
        slowest = max(runs, key=lambda each: each.run.iter_s)
        assert fastest is min(runs, key=lambda each: each.iter_s)
        assert slowest is max(runs, key=lambda each: each.iter_s)


def test_what_a_row_leaves_open_is_searched():
    row = _row("Megatron-LM README images/model_table", "GPT 70B")
    run = published_run(row)
    sizes = {plan.job.schedule.micro_batch_size for plan in run.candidates}
    chunks = {plan.placement.chunks for plan in run.candidates}
    assert sizes == {1, 2, 4, 8} and {1, 2, 3}.issubset(chunks)


def test_what_a_row_states_is_not_searched():
    run = published_run(_row("Narayanan2021-SC21-T1", "GPT 145.6B"))
    (plan,) = run.candidates
    assert plan.job.schedule.micro_batch_size == 2 and plan.placement.chunks == 2


@pytest.mark.parametrize(
    ("source", "model", "reason"),
    [
        ("Megatron-LM README mid-2020", "GPT-2 1B", "not in the catalogue"),
        ("Narayanan2021-SC21 sec 5.8", "GPT 175B", "does not state"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_why(source, model, reason):
    assert reason in published_run(_row(source, model)).skipped


def _row(source: str, model: str) -> dict[str, str]:
    with TABLE.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return next(row for row in rows if row["source"].startswith(source) and row["model"] == model)
