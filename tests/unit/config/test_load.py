"""Job files: every fault at once, overrides, numbers as YAML 1.2 writes them."""

import shlex
from copy import deepcopy
from pathlib import Path

import pytest

from raymega.api import load_job
from raymega.config.grid_text import degrees_of, set_options
from raymega.config.load import parse_job, parse_mapping
from raymega.config.schema import Job
from raymega.errors import ConfigError
from raymega.plan.validation.registry import job_faults

ROOT = Path(__file__).parents[3]
VERIFY = ROOT / "jobs" / "verify.yaml"


def _texts(parsed) -> str:
    return "\n".join(str(fault) for fault in [*parsed.faults, *job_faults(parsed.values)])


def test_verify_job_parses_without_faults():
    assert parse_job(VERIFY).job().run.name == "verify"


def test_overrides_reach_into_a_section_inside_another():
    job = parse_job(VERIFY, ["model.moe.num_experts=4", "model.moe.top_k=1"]).job()
    assert (job.model.moe.num_experts, job.model.moe.top_k) == (4, 1)
    assert job.model.moe.router_score_function == "softmax"
    assert "a is not a known key" in _texts(parse_job(VERIFY, ["a.b.c=1"]))


def test_overrides_replace_one_field_and_keep_yaml_types():
    job = parse_job(VERIFY, ["run.steps=7", "optimizer.lr=3e-4", "data.path=synthetic"]).job()
    assert (job.run.steps, job.optimizer.lr) == (7, 3e-4)


def test_faults_of_several_sections_are_reported_together():
    parsed = parse_job(
        VERIFY,
        ["run.setps=3", "run.steps=ten", "parallel.tp=3", "cluster.num_workers=7", "parallel.cp=3"],
    )
    text = _texts(parsed)
    assert "run.setps is not a known key" in text and "did you mean run.steps?" in text
    assert "run.steps='ten'" in text
    assert "parallel.tp=3; it must divide model.num_heads=8 (remainder 2)" in text
    assert "cluster.num_workers=7" in text
    assert "parallel.cp=3; a sequence is cut into 2 * cp = 6 chunks" in text
    with pytest.raises(ConfigError):
        parsed.job()


def test_rules_that_read_a_bad_field_stay_silent():
    parsed = parse_job(VERIFY, ["parallel.tp=two", "cluster.num_workers=7"])
    assert "cluster.num_workers" not in _texts(parsed)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.batch_ramp=4", "data.batch_ramp=4; input should be a list;"),
        ("data.batch_ramp=[8]", "[8]; data.batch_ramp[0]: input should be a mapping;"),
        (
            "data.batch_ramp=[{until_samples: 8}]",
            "data.batch_ramp[0].global_batch_size: it is missing;",
        ),
        (
            "data.batch_ramp=[{until_samples: 8, global_batch_size: 4, x: 1}]",
            "data.batch_ramp[0].x: it is not a known key;",
        ),
        ("memory.recompute_parts=[mlp]", "['mlp']; memory.recompute_parts[0]: input should be"),
    ],
)
def test_lists_are_refused_in_the_words_of_yaml(override, told):
    assert told in _texts(parse_job(VERIFY, [override]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.hidden_size=" + "9" * 400], "less than or equal to 9223372036854775807"),
        (["run.seed=9223372036854775808"], "less than or equal to 9223372036854775807"),
        (["model.num_layers=200001"], "model.num_layers=200001; tensors are listed layer by layer"),
        (
            ["schedule.name=gpipe", "schedule.chunks=100001"],
            "parallel.pp=2 with schedule.chunks=100001; that is 200002 stages",
        ),
    ],
)
def test_numbers_that_nothing_could_count_to_are_refused_at_once(overrides, told):
    assert told in _texts(parse_job(VERIFY, overrides))


def test_missing_section_names_each_required_field():
    raw = deepcopy(parse_job(VERIFY).raw)
    del raw["run"]
    text = "\n".join(map(str, parse_mapping(raw).faults))
    assert "run.name is missing" in text


@pytest.mark.parametrize("value", [True, "2", 2.0, -1, 0])
def test_degrees_are_strict_positive_integers(value):
    raw = deepcopy(parse_job(VERIFY).raw)
    raw["parallel"]["tp"] = value
    assert any("parallel.tp=" in str(fault) for fault in parse_mapping(raw).faults)


def test_section_that_is_no_mapping_is_one_fault():
    raw = {**parse_job(VERIFY).raw, "parallel": "auto"}
    faults = parse_mapping(raw).faults
    assert len(faults) == 1 and "parallel='auto'" in str(faults[0])


@pytest.mark.parametrize("text", ["- a\n- b\n", "run: [unclosed", ""])
def test_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        parse_job(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        parse_job(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "override", ["steps=3", "run.steps", "=3", "a..c=1", "run.name=@x", "run.name={a: 1, a: 2}"]
)
def test_malformed_override_is_a_fault_beside_the_others(override):
    text = _texts(parse_job(VERIFY, [override, "model.hiden_size=3"]))
    assert f"override {override!r}" in text and "did you mean model.hidden_size?" in text


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=.inf", "optimizer.beta2=1.0", "elastic.collective_timeout_s=.inf",
     "optimizer.max_grad_norm=.nan", "cluster.cpus_per_worker=0.00001", "run.steps=1:30",
     "run.seed=0123"],
)  # fmt: skip
def test_numbers_that_make_no_run_are_refused(override):
    assert len(parse_job(VERIFY, [override]).faults) == 1


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("parallel=auto", "parallel.layout=auto"),
        ("parallel: auto", "parallel.layout=auto"),
        (" parallel = auto", "parallel.layout=auto"),
        ("plugins=[acme]", "plugins.modules=[acme]"),
        ("precision=bfloat16", "precision.dtype=bfloat16"),
    ],
)
def test_short_form_of_a_file_is_told_as_the_override_that_it_means(override, meant):
    assert f"did you mean --set {meant}?" in _texts(parse_job(VERIFY, [override]))
    assert not parse_job(VERIFY, [meant]).faults


@pytest.mark.parametrize("text", ["\uff12\uff10", "0020", "20 steps", "\uff12\uff10 steps"])
def test_digits_of_any_script_are_told_as_the_number_that_yaml_reads(text):
    assert "write run.steps=20;" in _texts(parse_job(VERIFY, [f"run.steps='{text}'"]))
    assert "write run.steps" not in _texts(parse_job(VERIFY, [f"run.steps='{'9' * 5000}'"]))


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ("run.steps=7", ["run.steps=7"]),
        ({"run.steps": 7, "run.name": "a"}, ["run.steps=7", "run.name=a"]),
    ],
)
def test_overrides_that_are_no_list_are_told_as_the_list_that_they_mean(overrides, meant):
    for load in (parse_job, load_job):
        with pytest.raises(ConfigError) as caught:
            load(VERIFY, overrides)
        (fault,) = caught.value.faults
        assert fault.remedy == f"write overrides={meant!r}"
    assert load_job(VERIFY, meant).run.steps == 7
    assert load_job(VERIFY, iter(meant)).run.steps == 7


def test_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(VERIFY.read_text().replace("{tp: 1,", "{tp: 1, tp: 2,"))
    with pytest.raises(ConfigError, match="'tp' stands twice"):
        parse_job(path)


def test_home_of_nobody_is_left_for_the_checks():
    assert parse_job(VERIFY, ["data.path=~nobody-here/x"]).job().data.path.endswith("here/x")


def test_relative_paths_become_absolute_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = parse_job(VERIFY, ["data.path=corpus", "checkpoint.uri=runs"]).job()
    assert job.data.path == str(tmp_path / "corpus")
    assert job.checkpoint.uri == str(tmp_path / "runs")
    kept = parse_job(VERIFY, ["checkpoint.uri=s3://bucket/runs"]).job()
    assert (kept.data.path, kept.checkpoint.uri) == ("synthetic", "s3://bucket/runs")


def test_every_field_has_a_description():
    for section in Job.model_fields.values():
        for name in section.annotation.model_fields:
            assert section.annotation.describe(name), name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.5", 1.5),
        ("2", 2),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("2026-11-30", "2026-11-30"),
        ("2026-13-45", "2026-13-45"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_has_them(text, value):
    raw = parse_job(VERIFY, [f"tracking.mlflow_uri={text}"]).raw
    assert raw["tracking"]["mlflow_uri"] == value
    assert type(raw["tracking"]["mlflow_uri"]) is type(value)


@pytest.mark.parametrize(
    "text", ["9" * 5000, "!!int x", "!!int ''", "!!bool maybe", "!!timestamp x", "[" * 3000]
)
def test_values_that_yaml_cannot_make_are_refused_as_other_mistakes_are(tmp_path, text):
    assert "its value must be YAML" in _texts(parse_job(VERIFY, [f"run.steps={text}"]))
    path = tmp_path / "job.yaml"
    path.write_text(f"run: {{name: x, steps: {text}}}")
    with pytest.raises(ConfigError, match="is not YAML: "):
        parse_job(path)


def test_aliases_of_aliases_are_refused_before_they_are_written_out(tmp_path):
    """Nine lines that each repeat the one before nine times are 387 million values."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)),
    ]
    path = tmp_path / "job.yaml"
    path.write_text("\n".join([*lines, VERIFY.read_text()]))
    with pytest.raises(ConfigError) as caught:
        parse_job(path)
    (fault,) = caught.value.faults
    assert "make more than 100,000 values" in fault.fact and "without aliases" in fault.remedy
    path.write_text(f"{VERIFY.read_text()}\nmemory: &m {{recompute: full}}\n")
    assert parse_job(path).job().memory.recompute == "full"
    assert parse_job(VERIFY, ["data.path=&a synthetic"]).job().data.path == "synthetic"


def test_sequences_become_tuples_in_files_and_overrides(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        VERIFY.read_text()
        + "\nmemory:\n  recompute: selective\n  recompute_parts: [norm, attention]\n"
    )
    job = parse_job(path, ["data.batch_ramp=[{until_samples: 8, global_batch_size: 4}]"]).job()
    assert job.memory.recompute_parts == ("norm", "attention")
    assert job.data.batch_ramp[0].global_batch_size == 4


@pytest.mark.parametrize(
    ("stage", "name"), [(0, "none"), (1, "optimizer"), (2, "gradients"), (3, "parameters")]
)
def test_zero_stages_are_synonyms_of_what_is_sharded(stage, name):
    assert parse_job(VERIFY, [f"parallel.sharding={stage}"]).job().parallel.sharding == name


@pytest.mark.parametrize("value", ["4", "-1", "true", "1.0"])
def test_other_numbers_are_no_stage(value):
    (fault,) = parse_job(VERIFY, [f"parallel.sharding={value}"]).faults
    assert "parallel.sharding" in str(fault)


def test_overrides_to_paste_pass_a_shell_as_they_are():
    """A placement of layers has pipes, and a list a space."""
    overrides = [
        "parallel.stages=Ett|L",
        "memory.recompute_parts=[attention, norm]",
        "parallel.tp=2",
    ]
    words = shlex.split(set_options(overrides))
    assert words[::2] == ["--set"] * 3 and words[1::2] == overrides


def test_a_grids_option_with_two_equals_signs_leaves_the_degrees():
    assert degrees_of("tp=2,cp_method=a=b")["tp"] == 2


def test_widths_that_are_missing_name_no_range_without_a_member():
    text = _texts(parse_job(VERIFY, ["model.mla.kv_lora_rank=8"]))
    assert "model.mla.qk_rope_head_dim=0" in text and "use 1 to 0" not in text
