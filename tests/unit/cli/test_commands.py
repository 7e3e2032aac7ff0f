"""Commands as a user types them: help with an example, JSON on one line, mistakes exit 2."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raymega.cli.main import app
from raymega.cli.output import table
from raymega.errors import EXIT_CODES
from raymega.planner.calibration.published_runs import COLUMNS
from tests.support.command import raymega

VERIFY = str(Path(__file__).parents[3] / "jobs" / "verify.yaml")


def _commands(command: click.Command, *words: str) -> Iterator[list[str]]:
    """The words of every command and group there is."""
    if words:
        yield list(words)
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, *words, name)


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", list(_commands(get_command(app))), ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    assert "Example: raymega" in " ".join(_run(*command, "--help").split())


@pytest.mark.parametrize("words", list(_commands(get_command(app))), ids=" ".join)
def test_every_option_says_what_it_is_for(words):
    command = get_command(app)
    for word in words:
        command = command.commands[word]
    silent = [each.name for each in command.params if not each.help]
    assert not silent, "the docstring's Options lack them"
    assert not re.search(r"^Options:", command.help, re.MULTILINE)


def test_help_lists_every_exit_code():
    words = " ".join(_run("--help").split())
    for code, what in EXIT_CODES.items():
        assert f"{code}: {what}" in words


def test_plan_prints_grid_ranks_and_timetable():
    text = _run("plan", VERIFY, "--grid", "tp=2,pp=2,dp=2")
    assert "grid tp2-pp2-dp2: 8 workers" in text
    assert "45,344 parameters" in text and "bubble 0.250" in text
    assert "rank 1  .  F0 B0 B0 F1" in text


def test_plan_as_json_is_one_object_with_exact_counts():
    plan = json.loads(_run("plan", VERIFY, "--grid", "tp=2,pp=2,dp=2", "--json"))
    assert plan["world_size"] == 8 and plan["num_parameters"] == 45344
    # one object for all ranks of a stage that hold equally much
    assert [(each["pp"], each["num_ranks"]) for each in plan["ranks"]] == [(0, 4), (1, 4)]
    first = plan["ranks"][0]
    assert (first["first_rank"], first["tp"]) == (0, [0, 1])
    assert first["total"] - first["fixed_bytes"] == 32 * first["num_parameters"]


def test_a_run_without_end_is_null_in_json():
    """Spot nodes that are taken faster than work is saved: JSON has no infinity."""
    text = _run("plan", VERIFY, "--spot-price", "1", "--interruptions", "100000", "--json")
    plan = json.loads(text, parse_constant=pytest.fail)
    assert plan["prediction"]["bill"]["spot"]["seconds"] is None


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--runs", "nowhere.csv"], "'nowhere.csv' cannot be read"),
        (["--runs", "narrow.csv"], "'narrow.csv' lacks the columns source, model, layers"),
        (["--runs", "words.csv"], "m: n_gpus='many'; it must be a number"),
        ([VERIFY, "--runs", "words.csv"], "both a job file and --runs"),
        ([VERIFY, "--gpus", "16"], "--gpus without --top"),
        ([], "without a job file"),
        ([VERIFY, "--top", "-3"], "greater than or equal to 0"),
        ([VERIFY, "--top", "3", "--gpus", "-2"], "greater than or equal to 0"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_a_plan_cannot_be_made_of_is_refused(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("narrow.csv").write_text("a,b\n1,2\n")
    cells = dict.fromkeys(COLUMNS, "") | {"model": "m", "n_gpus": "many"}
    Path("words.csv").write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n")
    done = raymega("plan", *words)
    assert done.returncode == 2 and told in " ".join(done.stderr.replace("\u2502", " ").split())


RAMP = "data.batch_ramp=[{until_samples: 8, global_batch_size: 4}]"


def test_plan_tells_what_each_phase_of_a_ramp_costs():
    options = ["--set", RAMP, "--set", "schedule.name=gpipe", "--grid", "pp=2"]
    plan = json.loads(_run("plan", VERIFY, *options, "--json"))
    first, rest = plan["batch_phases"]
    assert (first["num_steps"], first["bubble"], rest["bubble"]) == (2, 0.5, 0.125)
    # gpipe holds every micro-batch of a step: 2 of the first phase, 8 of the second.
    assert rest["activation_bytes"] == 4 * first["activation_bytes"]
    assert max(rank["activation_bytes"] for rank in plan["ranks"]) == rest["activation_bytes"]
    text = _run("plan", VERIFY, *options)
    assert "steps 1 to 2, from sample 0: 4 sequences, 2 micro-batches; bubble 0.500" in text


def test_plan_counts_the_largest_activations_of_a_step(monkeypatch):
    """A schedule may hold more with fewer micro-batches; here one that does."""
    monkeypatch.setattr(
        "raymega.cli.plan.text._activation_bytes_of",
        lambda _plan, batch: (100 * batch.num_micro_batches, 1000 // batch.num_micro_batches),
    )
    plan = json.loads(_run("plan", VERIFY, "--set", RAMP, "--grid", "pp=2", "--json"))
    assert {rank["activation_bytes"] for rank in plan["ranks"]} == {800, 500}


def test_plan_states_what_snapshots_cost_when_there_are_any():
    grid = ("--grid", "tp=2,pp=1,dp=2")
    assert "snapshots" not in _run("plan", VERIFY, *grid)
    on = (*grid, "--set", "elastic.snapshot_every=1")
    text = _run("plan", VERIFY, *on)
    assert "snapshots in memory every step: a rank writes at most" in text
    assert "2 snapshots of it and of a rank of the previous node" in text
    paused = _run("plan", VERIFY, *on, "--set", "elastic.snapshot_during_save=pause")
    words = "to the memory of snapshots, which pause until it is written"
    assert words in paused and words not in text
    rank = json.loads(_run("plan", VERIFY, *on, "--json"))["ranks"][0]
    share = rank["num_parameters"] * 3 * 8 // 2
    assert rank["snapshot"] == {
        "share_bytes": share, "buffer_bytes": 2 * share, "server_bytes": 2 * share,
        "sent_bytes": share,
    }  # fmt: skip


def test_plan_shows_which_rank_holds_which_stage_and_what_is_empty():
    stages = _run("plan", VERIFY, "--set", "schedule.chunks=3").partition("stage")[2]
    rows = [line.split() for line in stages.partition("ranks;")[0].splitlines()]
    assert rows[2][:4] == ["0", "0", "0", "none"] and rows[3][:4] == ["1", "1", "0", "0"]
    assert rows[4][:4] == ["2", "0", "1", "1"]


def test_schedule_that_nobody_knows_is_the_only_mistake():
    done = raymega("schedule", "nope", "--pp", "2", "--micro-batches", "2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "schedule.name='nope'; it must be one of 1f1b" in done.stderr


def test_schema_describes_every_section():
    schema = json.loads(_run("schema"))
    assert {"run", "model", "data", "parallel", "checkpoint"} <= set(schema["properties"])


def test_mistakes_of_all_kinds_are_shown_at_once_and_nothing_is_started(tmp_path):
    raw = tmp_path / "corpus"
    raw.mkdir()
    (raw / "a.txt").write_text("raw text")
    done = raymega(
        "train", VERIFY, "--set", "parallel.tp=3", "--set", "run.setps=5", "--set",
        f"data.path={raw}", "--set", "checkpoint.uri=s4://bucket", "--set", "cluster.num_workers=9",
        "--set", "optimizer.lr=fast",
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    for part in (
        "parallel.tp=3; it must divide model.num_heads=8",
        "did you mean run.steps?",
        f"raymega data prepare {raw}",
        "s4://bucket",
        "cluster.num_workers=9",
        "optimizer.lr='fast'",
    ):
        assert part in done.stderr
    assert not list(tmp_path.glob("**/run.json"))


def test_missing_job_file_is_exit_2():
    assert raymega("plan", "nowhere.yaml").returncode == 2


def test_table_aligns_numbers_right_and_cuts_nothing():
    text = table(("name", "count"), [("a" * 100, 1), ("b", 12345)])
    assert text.splitlines()[2] == "a" * 100 + "       1"
    assert text.splitlines()[3].endswith("12,345")
