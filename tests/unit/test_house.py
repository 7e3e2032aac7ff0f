"""The house: what linters cannot see. Sizes, empty packages, a torch-free driver, shipped jobs."""

import ast
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from raymega import errors
from raymega.config.load import parse_job
from raymega.plan.run_plan import make_plan
from raymega.tracking.names import METRICS
from tests.support.servers.prometheus import dashboard_queries, metric_names

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "raymega").rglob("*.py"))
MAX_FILES_IN_FOLDER = 20
MAX_FILE_LINES, MAX_FUNCTION_LINES, LONG_FUNCTION_LINES, MAX_LONG_SHARE = 400, 80, 50, 0.05


def _functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1) for node in nodes]


def test_packages_hold_no_code_in_init_but_the_one_that_users_import():
    code = [p for p in SOURCES if p.name == "__init__.py" and p.read_text().strip()]
    assert code == [ROOT / "raymega/__init__.py"]


def test_no_file_is_too_long():
    sizes = {str(p): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in sizes.items() if n > MAX_FILE_LINES} == {}


def test_no_folder_is_a_heap():
    folders = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert {f: n for f, n in folders.items() if n > MAX_FILES_IN_FOLDER} == {}


def test_private_parts_of_ray_are_imported_in_one_file():
    private = re.compile(r"\bray\._(private|raylet)\b")
    users = {str(p.relative_to(ROOT)) for p in SOURCES if private.search(p.read_text())}
    assert users == {"raymega/ray_private.py"}


def test_private_names_of_torch_are_used_in_one_folder():
    """But for kernels that have no other name, and modules that are imported ahead by name."""
    private = re.compile(
        r"torch\._(?!foreach_|fused_adamw_|scaled_|dynamo|inductor|utils)|torch[\w.]+\._(?!softmax_backward|unsafe_view|fused_rms_norm)"
        r"|from torch[\w.]* import [^\n]*\b_|\b(c10d|dist)\._"
    )
    users = {p.parent.name for p in SOURCES if private.search(p.read_text())}
    assert users == {"workarounds"}


def test_the_c_library_is_called_in_one_file_that_says_when_each_call_goes():
    users = [p for p in SOURCES if "ctypes" in p.read_text()]
    assert users == [ROOT / "raymega/glibc.py"]
    functions = [n for n in ast.parse(users[0].read_text()).body if isinstance(n, ast.FunctionDef)]
    public = [each for each in functions if not each.name.startswith("_")]
    assert public and all("Goes when" in ast.get_docstring(each) for each in public)


def test_each_workaround_says_when_it_goes():
    modules = [p for p in SOURCES if p.parent.name == "workarounds" and p.name != "__init__.py"]
    assert modules
    assert [
        p.name for p in modules if "Goes when" not in ast.get_docstring(ast.parse(p.read_text()))
    ] == []


def test_functions_are_short():
    functions = [f for path in SOURCES for f in _functions(path)]
    assert [f for f in functions if f[1] > MAX_FUNCTION_LINES] == []
    long = [f for f in functions if f[1] > LONG_FUNCTION_LINES]
    assert len(long) <= MAX_LONG_SHARE * len(functions), long


def test_source_is_ascii():
    assert [p for p in SOURCES if not p.read_text(encoding="utf-8").isascii()] == []


def test_command_line_and_driver_leave_torch_unloaded():
    code = (
        "import sys, raymega.cli.main, raymega.orchestrate.driver.controller, raymega.orchestrate.workers.worker_actor;"
        "bad = {'torch', 'mlflow', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_jobs_load_and_plan(path):
    assert make_plan(parse_job(path).job()).grid.world_size >= 1


def test_dashboards_and_alerts_know_only_declared_metrics():
    alerts = (ROOT / "dashboards" / "alerts.yaml").read_text()
    shown = metric_names(alerts).union(*(metric_names(expr) for _, expr in dashboard_queries()))
    declared = {f"ray_{metric.prometheus_name}" for metric in METRICS}
    rays_own = {name for name in shown if name.startswith("ray_node_")}
    assert {name.removesuffix("_total") for name in shown - rays_own} - declared == set()


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)],
    ids=lambda kind: kind.__name__,
)
def test_every_error_pickles_with_its_faults(kind):
    fault = errors.Fault(fact="a=1", rule="must be 2", remedy="set a=2")
    again = pickle.loads(pickle.dumps(kind(fault, "text")))
    assert type(again) is kind and again.faults == (fault, errors.Fault(fact="text"))
    assert "a=1; must be 2; set a=2" in str(again)


def test_pytest_looks_into_every_folder_of_tests(request):
    skipped_samples = request.config.getini("norecursedirs")
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    assert not [path for path in folders if any(path.match(name) for name in skipped_samples)
                and path.name != "__pycache__"]  # fmt: skip
