"""`raymega verify` in real processes: shipped features pass, a planted mistake is found and named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raymega.verify.layout import Layout
from raymega.verify.shares import LayoutFailedError
from tests.mutations.tree import fork_server_of
from tests.unit.verify.jobs import JOBS, make_job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[3]
SMALL = ["--set", "model.num_layers=2", "--set", "data.global_batch_size=6"]
COLUMN_SUM = "        return y, start_all_reduce(y, self.tp)\n"


def _verify(*words: str, package: Path = ROOT) -> subprocess.CompletedProcess:
    code = "from raymega.cli.main import run; run()"
    command = [sys.executable, "-P", "-c", code, "verify", *words]
    env = os.environ | {"PYTHONPATH": str(package)}
    # A layout that compiles takes minutes where much else runs.
    return subprocess.run(
        [*command, "--timeout-s", "1500"],
        capture_output=True,
        text=True,
        timeout=2000,
        check=False,
        env=env,
    )


def _copy_package(folder: Path) -> None:
    """With the bytecode of what is not changed, but for files that another process is about to complete."""
    unfinished = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(ROOT / "raymega", folder / "raymega", ignore=unfinished)


def _lines(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """A copy of the package whose column-parallel linear forgets to sum its input's gradient."""
    folder = tmp_path_factory.mktemp("broken")
    _copy_package(folder)
    stream = folder / "raymega" / "parallel" / "tensor_parallel" / "sequence_parallel.py"
    text = stream.read_text()
    assert text.count(COLUMN_SUM) == 1
    stream.write_text(text.replace(COLUMN_SUM, COLUMN_SUM.replace("(y,", "(y.clone(),")))
    return folder


def test_tiny_job_passes_and_says_so_in_json():
    done = _verify(
        str(JOBS / "verify.yaml"), *SMALL, "--layouts", "3", "--max-ranks", "4", "--json"
    )
    assert done.returncode == 0, done.stderr
    *layouts, verdict = _lines(done)
    # the last one is resumed from a checkpoint of the first
    assert [line["event"] for line in layouts] == ["layout"] * 4 and verdict["event"] == "verdict"
    assert [line["resumed_from"] for line in layouts] == [None] * 3 + [layouts[0]["layout"]]
    assert layouts[0]["layout"] == "pp2, 1f1b, micro-batch 2"  # the job's own
    assert verdict["passed"] and all(line["passed"] for line in layouts)
    assert verdict["largest"]["deviation"] < 1e-9 and verdict["smallest_failing"] is None


@pytest.mark.wide
def test_gpt2_with_biases_and_no_rope_passes():
    gpt2 = ["--set", "model.family=gpt2", "--set", "model.num_kv_heads=num_heads"]
    done = _verify(str(JOBS / "verify.yaml"), *SMALL, *gpt2, "--layouts", "2", "--max-ranks", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same run on all 2 layouts" in done.stdout


def test_what_a_rank_raised_within_a_schedule_is_told_with_its_place(tmp_path):
    package = tmp_path / "package"
    _copy_package(package)
    with (package / "raymega" / "model" / "layers" / "lm_head.py").open("a") as file:
        file.write(
            "\n\ndef _fail(*_):\n    raise ValueError('planted')\n\n\nHead.loss_sum = _fail\n"
        )
    own = ["--set", "parallel.pp=2", "--layouts", "1", "--max-ranks", "2"]
    job = str(JOBS / "verify.yaml")
    done = _verify(job, *SMALL, *own, package=package)
    assert done.returncode == 4, done.stdout + done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    assert "ValueError: planted; on pipeline stage 0, at forward 0" in told


@pytest.mark.wide
def test_planted_mistake_is_found_and_its_smallest_layout_named(broken):
    own = ["--set", "parallel.tp=2", "--set", "parallel.dp=2", "--set", "parallel.pp=1"]
    words = [*SMALL, *own, "--layouts", "2", "--max-ranks", "8", "--seed", "1"]
    done = _verify(str(JOBS / "verify.yaml"), *words, "--json", package=broken)
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = _lines(done)[-1]
    smallest = verdict["smallest_failing"]
    assert not verdict["passed"] and smallest["grid"] == {"tp": 2, "cp": 1, "pp": 1, "dp": 1}
    assert smallest["schedule"] == "gpipe" and smallest["micro_batch_size"] == 6
    first = smallest["first_above_limit"]
    assert first["step"] == 1 and first["deviation"] > 1e-3


@pytest.mark.wide
def test_planted_mistake_is_told_to_people_too(broken):
    words = [*SMALL, "--set", "parallel.tp=2", "--set", "parallel.pp=1", "--layouts", "1"]
    done = _verify(str(JOBS / "verify.yaml"), *words, package=broken)
    assert done.returncode == 1
    for part in (
        "NOT the same run on 1 of 1",
        "reproduces it: tp2, gpipe",
        "first at step 1:",
        "1e-09",
    ):
        assert part in done.stdout


@pytest.mark.wide
def test_mistake_that_float64_never_meets_is_found_in_the_runs_own_dtype(tmp_path):
    """Of gradients in float32 the fused update takes a divisor; float64's are scaled before."""
    package = tmp_path / "package"
    _copy_package(package)
    file = package / "raymega" / "optim" / "optimizer.py"
    text = file.read_text()
    assert text.count("torch.full((), 1 / factor,") == 1
    file.write_text(text.replace("torch.full((), 1 / factor,", "torch.full((), 2 / factor,"))
    words = [str(JOBS / "verify.yaml"), *SMALL, "--layouts", "1", "--max-ranks", "2"]
    assert _verify(*words, package=package).returncode == 0
    for precision in ("float32", "bfloat16"):
        assert _verify(*words, "--precision", precision).returncode == 0
        found = _verify(*words, "--precision", precision, package=package)
        assert found.returncode == 1 and "NOT the same run" in found.stdout, found.stderr


@pytest.mark.wide
def test_what_a_checkpoint_lacks_is_found_by_the_run_that_is_resumed(tmp_path):
    package = tmp_path / "package"
    _copy_package(package)
    file = package / "raymega" / "train" / "state.py"
    text = file.read_text()
    assert text.count("        samples=samples,\n") == 1
    file.write_text(text.replace("        samples=samples,\n", "        samples=samples - 1,\n"))
    words = [str(JOBS / "verify.yaml"), *SMALL, "--layouts", "2", "--max-ranks", "2"]
    found = _verify(*words, package=package)
    assert found.returncode == 1 and "resumed from a checkpoint of pp2" in found.stdout, (
        found.stderr
    )
    assert "NOT the same run on 1 of 3" in found.stdout


def test_mistake_of_the_user_is_exit_2():
    done = _verify(str(JOBS / "verify.yaml"), "--max-params", "100")
    assert done.returncode == 2 and "--max-params 100" in done.stderr and done.stdout == ""


def test_rank_that_raises_is_named_and_the_next_layout_runs():
    job, absent = make_job(*SMALL[1::2]), make_job("data.path=/nowhere", *SMALL[1::2])
    with fork_server_of(None, timeout_s=200) as fork_server:
        with (
            pytest.raises(LayoutFailedError, match=r"rank [01]: .*ConfigError.*/nowhere"),
            fork_server.run(absent, Layout(tp=2), steps=1),
        ):
            pass
        with fork_server.run(job, Layout(tp=2), steps=1) as results:
            assert len(results) == 2 and len(results[0].curve) == 1


def test_layout_that_takes_too_long_is_stopped_and_leaves_no_process():
    with fork_server_of(None, timeout_s=0.05) as fork_server:
        with (
            pytest.raises(LayoutFailedError, match=r"no rank ended within 0\.05 s"),
            fork_server.run(make_job(), Layout(dp=2), steps=50),
        ):
            pass
        pid = fork_server.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        assert not children.exists() or children.read_text() == ""
    assert not Path(f"/proc/{pid}").exists()
