"""The commands: tables for people, one JSON object for programs, exit codes; no torch."""

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.cli.checkpoint.command import checkpoint_app
from raymega.errors import ConfigError
from raymega.storage.local import LocalStore
from tests.support.leases import take_lease
from tests.unit.checkpoint.support import MODELS, STATE, make_grid, save_checkpoint


@pytest.fixture
def run(tmp_path):
    store = LocalStore(tmp_path)
    grid = make_grid("tp2")
    return tmp_path, store, save_checkpoint(store, MODELS["gpt2-tied"], grid, step=100)


def _call(*args):
    return CliRunner(env={"COLUMNS": "200"}).invoke(checkpoint_app, [str(arg) for arg in args])


@pytest.mark.parametrize("command", ["list", "verify"])
def test_list_and_verify_give_every_checkpoint(run, command):
    root, _, manifest = run
    done = _call(command, root, "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["uri"] == str(root)
    (row,) = told["checkpoints"]
    assert row["key"] == manifest.key and row["is_whole"] is True and row["step"] == 100
    table = _call(command, root)
    assert table.exit_code == 0 and manifest.key in table.stdout and "yes" in table.stdout


def test_verify_exits_1_and_names_what_is_corrupt(run):
    root, store, manifest = run
    key = manifest.file_key(manifest.boxes[0])
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, [data], overwrite=True)
    told = _call("verify", root, "--json")
    assert told.exit_code == 1 and key in json.loads(told.stdout)["checkpoints"][0]["faults"][0]
    shown = _call("verify", root)
    assert shown.exit_code == 1 and key in shown.stdout and "crc32" in shown.stdout


def test_show_describes_state_grid_and_tensors(run):
    root, _, manifest = run
    told = json.loads(_call("show", root, "--json").stdout)
    assert told["state"] == {**STATE, "step": 100} and told["grid"] == manifest.grid
    assert told["total_bytes"] == sum(tensor["num_bytes"] for tensor in told["tensors"])
    names = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert names["model/embedding.tokens.weight"]["shape"] == [40, 16]
    assert names["model/embedding.tokens.weight"]["num_boxes"] == 2
    shown = _call("show", root / "checkpoints" / "step-00000100").stdout
    assert "samples=800" in shown and "tp=2" in shown and "40 x 16" in shown


def test_list_of_an_empty_run_is_empty(tmp_path):
    assert isinstance(_call("list", tmp_path).exception, ConfigError)
    take_lease(LocalStore(tmp_path))
    assert json.loads(_call("list", tmp_path, "--json").stdout)["checkpoints"] == []
    assert "no checkpoints" in _call("list", tmp_path).stdout


@pytest.mark.parametrize("command", [("list",), ("prune",), ("prune", "--keep-last", "1")])
@pytest.mark.parametrize("where", ["{folder}/mistyped", "gs://team/runs", "s3://No_Bucket/runs"])
def test_place_where_nothing_can_be_is_the_users_mistake(command, where, tmp_path):
    name, *options = command
    done = _call(name, where.format(folder=tmp_path), *options)
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    assert done.exception.faults[0].remedy


def test_a_line_to_paste_has_a_folder_with_a_space_in_quotes(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(str(folder))
    words = shlex.split(caught.value.faults[0].remedy.partition(": ")[2])
    assert words[:4] == ["raymega", "convert", "hf-import", str(folder)]


def test_show_of_nothing_is_the_users_mistake(tmp_path):
    assert isinstance(_call("show", tmp_path).exception, ConfigError)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_help_has_an_example(command):
    assert f"Example: raymega checkpoint {command}" in _call(command, "--help").stdout


def test_commands_and_the_drivers_modules_leave_torch_unloaded():
    code = (
        "import sys, raymega.cli.checkpoint.command, raymega.checkpoint.format.manifest_builder,"
        "raymega.checkpoint.tools.retention; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert done.returncode == 0


def test_diff_shows_the_largest_difference_and_judges_it_only_when_asked(run, tmp_path_factory):
    root, _, manifest = run
    other = tmp_path_factory.mktemp("other")
    save_checkpoint(LocalStore(other), MODELS["gpt2-tied"], make_grid("pp2-dp2"), step=200)
    shown = _call("diff", root, other)
    assert shown.exit_code == 0 and "largest relative difference: 0 in " in shown.stdout
    told = json.loads(_call("diff", root, other, "--json", "--limit", "0").stdout)
    assert told["steps"] == [100, 200]
    assert {each["relative"] for each in told["tensors"]} == {0.0}
    assert {each["name"] for each in told["tensors"]} == set(manifest.tensors())
    third = tmp_path_factory.mktemp("third")
    save_checkpoint(LocalStore(third), MODELS["gpt2-untied"], make_grid("tp1"))
    assert _call("diff", root, third).exit_code == 0
    assert _call("diff", root, third, "--limit", "inf").exit_code == 0
    judged = _call("diff", root, third, "--limit", "1e-9")
    assert judged.exit_code == 1 and "only in the second" in judged.stdout


def test_copy_brings_the_newest_checkpoint_to_another_store(run, tmp_path_factory):
    root, store, _ = run
    newest = save_checkpoint(store, MODELS["gpt2-tied"], make_grid("tp2"), step=200)
    target = tmp_path_factory.mktemp("target")
    told = json.loads(_call("copy", root, target, "--json").stdout)
    assert told == {
        "uri": f"{target}/{newest.key}", "step": 200, "bytes": newest.total_bytes,
        "files_written": 2, "files_found": 0, "model_files_written": 0,
    }  # fmt: skip
    assert _call("verify", target).exit_code == 0
    again = _call("copy", root / "checkpoints" / "step-00000200", target)
    assert again.exit_code == 0 and "0 files written, 2 existed already" in again.stdout


def test_prune_shows_first_and_then_deletes_what_need_not_be_kept(run):
    root, store, first = run
    for step in (200, 300, 400):
        save_checkpoint(store, MODELS["gpt2-tied"], make_grid("tp2"), step=step)
    before = list(store.list(""))
    for words in ([], ["--keep-last", "1", "--keep-every", "100"]):
        assert _call("prune", root, *words).exit_code == 0
        assert list(store.list("")) == before
    rule = ("--keep-last", "1", "--keep-every", "200")
    dry = _call("prune", root, *rule, "--dry-run")
    assert dry.exit_code == 0 and f"would have deleted {first.key}" in dry.stdout
    assert list(store.list("")) == before
    told = json.loads(_call("prune", root, *rule, "--json").stdout)
    assert len(told["deleted"]) == 8 and told["dry_run"] is False
    rows = json.loads(_call("list", root, "--json").stdout)["checkpoints"]
    assert [row["step"] for row in rows] == [400, 200]
    refused = _call("prune", root, "--keep-best", "1")
    assert isinstance(refused.exception, ConfigError)
