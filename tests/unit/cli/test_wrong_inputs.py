"""Wrong inputs are answered with fact, rule and remedy: no traceback, no hang, the cause in the last line."""

import builtins
import runpy
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from raymega.__main__ import run
from raymega.checkpoint.format.manifest import commit
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.load import parse_job
from raymega.errors import CapacityError
from raymega.messages import NodeSlots
from raymega.orchestrate.core.rank_placement import place_ranks
from raymega.orchestrate.core.state import RunState, State
from raymega.plan.grid import Grid
from raymega.session import _no_start
from raymega.storage.registry import open_store
from tests.golden.commands import called
from tests.golden.scenery import furnish
from tests.support.jobs import VERIFY

TABLE = yaml.safe_load((Path(__file__).parent / "wrong_inputs.yaml").read_text())
CASES = {f"{group}-{name}": case for group, cases in TABLE.items() for name, case in cases.items()}
JOBS = {
    "JOB": VERIFY,
    **{
        word: VERIFY.with_name(f"{name}.yaml")
        for word, name in {
            "LLAVA": "llava", "DISTIL": "distill", "DPO": "dpo", "CLASSES": "classify", "T5": "t5",
        }.items()
    },
}  # fmt: skip
"""Shipped job files by the word that stands for one in a case."""
MOST_CHARS = 800
"""Most characters of one line of an answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    furnish(folder)
    # the same weights under the names of another model
    shutil.copytree(folder / "ours", folder / "unrelated")
    _, manifest = open_checkpoint(str(folder / "ours"))
    odd = tuple(replace(box, tensor=box.tensor.replace("layers.", "h.")) for box in manifest.boxes)
    (folder / "unrelated" / manifest.key).unlink()
    commit(open_store(str(folder / "unrelated")), replace(manifest, boxes=odd))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_answered(name, folder, monkeypatch):
    case = CASES[name]
    monkeypatch.chdir(folder)
    for path, text in case.get("files", {}).items():
        Path(path).write_text(text)
    ended = called(*_words(case["words"], folder))
    told = " ".join((ended.stdout + ended.stderr).replace("\u2502", " ").split())
    assert ended.code == case["code"], told
    missing = [text for text in case["tells"] if text not in told]
    assert not missing, told
    _judge(ended)


def _words(text, folder):
    named = [str(JOBS.get(word, word)) for word in shlex.split(f"{text} ")]
    return [word.replace("FOLDER", str(folder)) for word in named]


def _judge(ended):
    """The form of an answer: lines that are short enough, and a fact, a rule and a remedy."""
    assert "Traceback" not in ended.stderr and "<unicode string>" not in ended.stderr
    if ended.code != 2 or "Usage:" in ended.stderr:
        return
    assert not ended.stdout, "nothing was begun"
    for line in ended.stderr.splitlines():
        if line.endswith("then Ray and its workers start."):  # told before anything is looked at
            continue
        assert len(line) <= MOST_CHARS
        assert line.count("; ") >= 2, "fact; rule; remedy"


def test_there_are_29_and_40():
    elsewhere = {"53", "54", "59", "64", "67", "68", "75"}  # below, and tests/unit/storage
    tried = {name.split("-")[0] for name in TABLE["first"]} | elsewhere
    assert len(tried) == 29 and len(TABLE["new"]) >= 40 and len(TABLE["lately"]) >= 40


WHOLE = [
    path
    for path, value in parse_job(VERIFY).values.items()
    if isinstance(value, int) and not isinstance(value, bool)
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("value", ["9223372036854775807", "1000003"])
def test_absurd_number_ends_with_a_plan_or_a_refusal(path, value):
    ended = called("plan", str(VERIFY), "--set", f"{path}={value}", "--gpu", "h100")
    assert ended.code in (0, 2) and "Traceback" not in ended.stderr


def test_64_ctrl_c_while_the_command_line_loads(monkeypatch, capsys):
    load = builtins.__import__

    def interrupted(name, *rest):
        if name == "raymega.cli.main":
            raise KeyboardInterrupt
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted before anything was started\n"


def test_module_is_the_same_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["raymega", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("raymega", run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("raymega ")


def test_67_ctrl_c_twice_says_what_it_cost():
    state = RunState(state=State.RUNNING, attempt=1, step=80, saved_step=60, since_s=0.0, reason="")
    assert state.interruption == (
        "interrupted while running at step 80; 20 of its steps are not saved"
    )


def _nodes(cpus, *, gpus=0.0, needs_gpu=False, slots=0):
    return [
        NodeSlots(node_id=f"n{i}", address="", num_slots=slots, cpus=each, gpus=gpus, needs_gpu=needs_gpu)
        for i, each in enumerate(cpus)
    ]  # fmt: skip


def test_68_gpu_job_without_gpus_names_the_gpu():
    with pytest.raises(CapacityError) as caught:
        place_ranks(_nodes([2.0], needs_gpu=True), Grid(), block=1)
    text = str(caught.value)
    assert "cluster.device=cuda, and no node has a GPU" in text
    assert "--set cluster.device=cpu" in text and "cpus_per_worker" not in text


@pytest.mark.parametrize(
    ("cpus", "grid", "block", "share"),
    [
        ([2.0], Grid(dp=8), 1, "0.25"),
        ([2.0, 2.0], Grid(tp=2, dp=3), 2, "0.5"),
        ([16.0], Grid(dp=8), 1, "2"),
        ([3.0], Grid(dp=7), 1, "0.428"),
    ],
)
def test_too_few_cpus_name_the_share_that_fits(cpus, grid, block, share):
    with pytest.raises(CapacityError, match=f"--set cluster.cpus_per_worker={share},"):
        place_ranks(_nodes(cpus), grid, block=block)
    # the remedy works: as many slots as that share gives
    slots = [NodeSlots(node_id=f"n{i}", address="", num_slots=int(each / float(share) + 1e-6))
             for i, each in enumerate(cpus)]  # fmt: skip
    assert len(place_ranks(slots, grid, block=block)) == grid.world_size


@pytest.mark.parametrize("number", [53, 54, 59])
def test_ray_that_does_not_start_names_load_and_logs(number):
    text = str(_no_start("local", RuntimeError(f"timed out {number}\nmore")))
    assert f"timed out {number})" in text and "the load is" in text
    assert "ray start --head" in text and "Ray's own logs are in /tmp/ray" in text
