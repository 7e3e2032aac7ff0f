"""The package as its users meet it: its Python names, its version, its wheel."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import raymega
from raymega.config.shipped_files import shipped_file
from raymega.errors import ConfigError

ROOT = Path(raymega.__file__).parents[1]
API = ("load_job", "open_checkpoint", "plan", "train", "verify")


def _python(*code, python=sys.executable, cwd=None):
    """Standard output of a process of its own."""
    done = subprocess.run(
        [python, "-c", "\n".join(code)], capture_output=True, text=True, timeout=300, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_loads_nothing_heavy():
    assert _python(
        "import sys, raymega",
        "print({'torch', 'ray', 'mlflow', 'pydantic'} & set(sys.modules) or 'nothing')",
    ) == ["nothing"]


@pytest.mark.parametrize(
    "first", ["", "import raymega.plan.grid, raymega.train, raymega.verify.run"]
)
def test_functions_are_those_of_the_api_whatever_was_imported_before(first):
    assert _python(
        first,
        "import raymega, raymega.plan.grid as grid",
        "from raymega import load_job, plan",
        "made = plan(load_job('jobs/verify.yaml', ['parallel.tp=2']))",
        "print(made == raymega.api.plan(made.job), grid.__name__)",
        f"print(all(callable(getattr(raymega, name)) for name in {API}))",
    ) == ["True", "raymega.plan.grid", "True"]


def test_names_are_listed_and_others_are_refused():
    assert {*API, "__version__"} <= set(dir(raymega))
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        _ = raymega.tain


def test_shipped_job_file_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert raymega.load_job("jobs/verify.yaml").run.name == "verify"
    for name in ("jobs/none.yaml", str(tmp_path / "jobs/verify.yaml")):
        with pytest.raises(ConfigError, match="does not exist"):
            raymega.load_job(name)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/verify.yaml").write_text("run: {name: mine}\n")
    with pytest.raises(ConfigError):  # the user's own file goes first, and lacks sections
        raymega.load_job("jobs/verify.yaml")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with raymega's wheel, and this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    if not tracked:
        pytest.skip("not a git repository")
    for name in tracked:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            to = folder / "source" / name
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", "./source"]
    subprocess.run([*pip, *build], cwd=folder, check=True, timeout=500)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    (wheel,) = (folder / "wheels").iterdir()
    install = ["--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, *install], check=True, timeout=500)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


def test_wheel_has_code_types_licence_and_files(environment, tmp_path):
    found = _python(
        "import raymega, importlib.metadata as m",
        "from pathlib import Path",
        "from raymega.config.shipped_files import shipped_file",
        "print(raymega.__file__, m.metadata('raymega')['License-Expression'])",
        "print(Path(raymega.__file__).with_name('py.typed').is_file())",
        "for n in ('jobs/demo.yaml', 'dashboards/raymega.json', 'cluster/aws.yaml'):",
        "    print(shipped_file(n))",
        python=environment / "bin/python",
        cwd=tmp_path,
    )
    assert all(Path(path).is_relative_to(environment) for path in (found[0], *found[3:]))
    assert found[1:3] == ["Apache-2.0", "True"] and len(found) == 6
    assert shipped_file("jobs/demo.yaml") == ROOT / "jobs/demo.yaml"


def test_wheel_plans_a_shipped_job_from_another_folder(environment, tmp_path):
    command = [environment / "bin/raymega", "plan", "jobs/verify.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '"world_size": 2' in done.stdout


@pytest.mark.wide
@pytest.mark.ray
def test_wheel_trains_a_shipped_job_from_another_folder(environment, tmp_path):
    settings = ("run.steps=3", f"checkpoint.uri={tmp_path}/runs", "tracking.mlflow_uri=off")
    sets = [word for each in settings for word in ("--set", each)]
    command = [environment / "bin/raymega", "train", "jobs/verify.yaml", "--address", "local"]
    done = subprocess.run(
        [*command, *sets], cwd=tmp_path, capture_output=True, text=True, timeout=500,
        env={**os.environ, "PATH": f"{environment}/bin:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/verify"
    assert (run / "metrics.jsonl").is_file() and raymega.open_checkpoint(str(run)).step == 3


@pytest.mark.wide
@pytest.mark.ray
def test_python_page_runs_as_it_stands(tmp_path):
    """Its example, with a home of its own for the run."""
    page = (ROOT / "docs/python.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, ended, *tensors, _ = done.stdout.splitlines()
    assert first == "2 ranks, 8 micro-batches a step" and ended.startswith("finished 12 goodput")
    assert len(tensors) == 3
