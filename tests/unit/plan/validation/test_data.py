import pytest

from raymega.cli.plan.datasets import show_datasets
from raymega.config.load import parse_job
from raymega.data.blends.epochs import planned_reads
from raymega.plan.validation.registry import job_faults
from tests.support.jobs import VERIFY

A, B = "{path: /a, weight: 0.7}", "{path: /b, weight: 0.3}"


def _facts(*overrides):
    return [fault.fact for fault in job_faults(parse_job(VERIFY, overrides).values)]


@pytest.mark.parametrize(
    "overrides",
    [
        [f"data.sources=[{A}, {B}]", "data.path=none"],
        [f"data.stages=[{{from_tokens: 100, sources: [{A}]}}]"],
        ["data.validation=[{name: x, path: /a}, {name: y, path: /a, split: train}]"],
        ["data.sources=[{path: /a, weight: 1}, {path: /b, weight: 1e-6}]", "data.path=none"],
    ],
)
def test_legal_blends(overrides):
    assert _facts(*overrides) == []


@pytest.mark.parametrize(
    "overrides, fact",
    [
        (["data.path=none"], "data.path=none and data.sources=[]"),
        ([f"data.sources=[{A}]"], "data.path='synthetic' with 1 data.sources"),
        (
            [f"data.sources=[{A}, {B}, {A}]", "data.path=none"],
            "data.sources has path='/a' 2 times",
        ),
        (
            ["data.sources=[{path: /a}, {path: /b, weight: 1e-7}]", "data.path=none"],
            "data.sources[1].weight=1e-07",
        ),
        (
            [f"data.stages=[{{from_tokens: 9, sources: [{A}, {A}]}}]"],
            "data.stages[0].sources has path='/a' 2 times",
        ),
        (
            [
                f"data.stages=[{{from_tokens: 100, sources: [{A}]}}, {{from_tokens: 101, sources: [{B}]}}]"
            ],
            "data.stages[1].from_tokens=101",
        ),
        (
            ["data.validation=[{name: x, path: /a}, {name: x, path: /b}]"],
            "data.validation has name=x 2 times",
        ),
    ],
)
def test_illegal_blends_are_refused(overrides, fact):
    assert _facts(*overrides) == [fact]


def test_least_weight_of_the_remedy_is_legal():
    values = ["data.path=none", "data.sources=[{path: /a}, {path: /b, weight: 1e-7}]"]
    (fault,) = job_faults(parse_job(VERIFY, values).values)
    least = fault.remedy.split()[4]
    values[1] = f"data.sources=[{{path: /a}}, {{path: /b, weight: {least}}}]"
    assert job_faults(parse_job(VERIFY, values).values) == []


def test_relative_paths_of_lists_become_absolute():
    sources = "[{path: a}, {path: synthetic:x}, {path: megatron:m/x}, {path: s3://b/c}]"
    stages = "[{from_tokens: 9, sources: [{path: b}]}]"
    data = parse_job(VERIFY, [f"data.sources={sources}", f"data.stages={stages}"]).job().data
    paths = [source.path for _, entries in data.blends for source in entries]
    assert [path.startswith("/") for path in paths] == [True, False, False, False, True]
    assert paths[1] == "synthetic:x" and paths[3] == "s3://b/c"
    assert paths[2].startswith("megatron:/") and paths[2].endswith("/m/x")


def test_plan_reports_tokens_and_epochs_of_each_dataset(capsys):
    """20 steps of 16 sequences of 32 tokens: 100 of two datasets, then 220 of one."""
    sources = "[{path: synthetic:a, weight: 3}, {path: synthetic:b, weight: 1}]"
    stages = "[{from_tokens: 3200, sources: [{path: synthetic:b}]}]"
    job = parse_job(
        VERIFY, ["data.path=none", f"data.sources={sources}", f"data.stages={stages}"]
    ).job()
    found = [(use.first_sample, use.samples, use.epochs) for use in planned_reads(job)]
    assert found == [
        (0, 75, 75 / 65536),
        (0, 25, 25 / 65536),
        (100, 220, 245 / 65536),
    ]
    show_datasets(job)
    text = capsys.readouterr().out
    assert "synthetic:b" in text and "7,040" in text and "0.00374" in text


def test_plan_of_a_blend_needs_no_data():
    sources = "[{path: /nowhere/a}, {path: s3-like/b}]"
    job = parse_job(VERIFY, ["data.path=none", f"data.sources={sources}"]).job()
    assert [use.epochs for use in planned_reads(job)] == [None, None]
    assert [use.tokens for use in planned_reads(job)] == [5120, 5120]
