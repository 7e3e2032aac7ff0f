"""Recipes: the shipped ones, the default, and those that are refused before anything starts."""

import re
from pathlib import Path

import pytest

from raymega.curate.options import DEFAULT_STEPS
from raymega.curate.plan import plan_stages
from raymega.curate.recipe import read_recipe
from raymega.errors import ConfigError

SHIPPED = sorted((Path(__file__).parents[3] / "jobs/curate").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_recipe_is_read(path):
    specs = read_recipe(f"jobs/curate/{path.name}")
    assert "near" in [spec.name for spec in specs]
    # The steps that need files of the user stand there as comments.
    commented = re.findall(r"^  # (- \w+: \{.*\})$", path.read_text(), re.MULTILINE)
    assert commented or path.name == "minimal.yaml"


def test_empty_recipe_has_the_steps_that_need_no_file(tmp_path):
    (tmp_path / "r.yaml").write_text("{}\n")
    assert tuple(spec.name for spec in read_recipe(str(tmp_path / "r.yaml"))) == DEFAULT_STEPS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: [nearr]", "did you mean near"),
        ("steps: [{near: {treshold: 0.8}}]", "did you mean near.threshold"),
        ("steps: [{near: {threshold: 2}}]", "near.threshold=2"),
        ("steps: [{language: {engine: lingua}}]", "language.engine='lingua'"),
        ("steps: [{quality: false}]", "quality=False"),
        ("steps: [{quality: {languages: [EN]}}]", "quality.languages"),
        ("steps: [{quality: {languages: [english]}}]", "quality.languages"),
        ("steps: [{sample: {seed: 10000000000}}]", "sample.seed=10000000000"),
        ("steps: [exact, exact]", "exact twice"),
        ("steps: [exact, extract]", "extract is step 2"),
        ("steps: []", "must be a list of steps"),
        ("steps: [decontaminate]", "decontaminate.tasks is missing"),
        ("stepps: [near]", "stepps is not a known key"),
        ("- near", "holds no mapping"),
        ("steps: [", "is not YAML"),
    ],
)
def test_wrong_recipe_is_refused(text, told, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(str(tmp_path / "r.yaml"))
    assert told in str(refused.value)
    assert all(fault.fact and fault.rule and fault.remedy for fault in refused.value.faults)


def test_stage_of_a_group_does_not_depend_on_the_others_before_a_comparison(tmp_path):
    (tmp_path / "r.yaml").write_text("steps: [mend, exact, personal, near, sample]")
    specs = read_recipe(str(tmp_path / "r.yaml"))
    one, two = (plan_stages(specs, assets={}, corpus=corpus, reading="") for corpus in "ab")
    assert [len(stage.steps) for stage in one] == [1, 1, 1]
    assert [a.digest == b.digest for a, b in zip(one, two, strict=True)] == [True, False, False]
