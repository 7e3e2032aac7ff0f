"""No pickle on the way of a checkpoint: what the package can reach, and files that try."""

import ast
import os
import pickle
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from raymega.storage.registry import open_store
from tests.unit.checkpoint.support import MODELS, make_grid, save_checkpoint

PACKAGE = Path(__file__).parents[2] / "raymega"
ALLOWED = {"raymega.convert.torch_dcp.pickle_reader"}
"""Where pickles are read: torch's, by a table of stand-ins."""
PICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS = {("torch", "load"), ("torch", "save")}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@cache
def _sources() -> dict[str, ast.Module]:
    """Return the package's modules; not at import, as that takes 3 s of each process that collects tests."""
    return {_module(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@pytest.fixture(scope="module", autouse=True)
def _let_go():
    """Trees of a whole package would take each later collection of garbage a second."""
    yield
    _sources.cache_clear()


def _imports(tree: ast.AST) -> set[str]:
    """Every module named in an import, those inside functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _reachable(module: str) -> set[str]:
    seen, rest = set(), [module]
    while rest:
        at = rest.pop()
        if at not in seen and at in _sources():
            seen.add(at)
            rest += _imports(_sources()[at])
    return seen


def test_one_module_reads_pickles():
    users = {name for name, tree in _sources().items() if _imports(tree) & PICKLING}
    assert users == ALLOWED


def test_nothing_calls_a_loader_that_unpickles():
    calls = [
        (name, ast.unparse(node))
        for name, tree in _sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in LOADERS
    ]
    assert calls == []
    told = [
        (name, keyword.arg)
        for name, tree in _sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in ("allow_pickle", "weights_only")
    ]
    assert told == [], "numpy unpickles only when told"


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "entry",
    [
        "raymega.train.entry", "raymega.checkpoint.load.reader", "raymega.checkpoint.save.writer",
        "raymega.checkpoint.tools.inspection", "raymega.cli.checkpoint.command", "raymega.cli.train",
        "raymega.cli.plan.command", "raymega.cli.verify", "raymega.orchestrate.driver.controller", "raymega.api",
        "raymega.convert.huggingface.importer", "raymega.convert.huggingface.exporter", "raymega.convert.native",
    ],
)  # fmt: skip
def test_native_ways_never_reach_it(entry):
    assert entry in _sources()
    assert not _reachable(entry) & ALLOWED


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


COMMANDS = {
    "list": ("checkpoint", "list", "{uri}"),
    "show": ("checkpoint", "show", "{uri}"),
    "verify": ("checkpoint", "verify", "{uri}"),
    "diff": ("checkpoint", "diff", "{uri}", "{uri}"),
    "copy": ("checkpoint", "copy", "{uri}", "{out}"),
    "prune": ("checkpoint", "prune", "{uri}"),
    "hf-export": ("convert", "hf-export", "{uri}", "--out", "{out}"),
    "dcp-export": ("convert", "dcp-export", "{uri}", "--out", "{out}"),
    "train": ("train", "jobs/verify.yaml", "--dry-run", "--set", "checkpoint.uri={root}"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["data", "manifest"])
def test_malicious_checkpoint_runs_nothing(tmp_path, target):
    """Pickles where data and manifests should be; every command refuses or passes over them."""
    run = tmp_path / "runs" / "verify"
    manifest = save_checkpoint(open_store(str(run)), MODELS["llama-tied"], make_grid("tp2"))
    keys = manifest.file_sizes() if target == "data" else {manifest.key: 0}
    for key, size in keys.items():
        bomb = pickle.dumps(Bomb(tmp_path / "ran"))
        (run / key).write_bytes(bomb + b"\0" * max(0, size - len(bomb)))
    arguments = {"uri": run, "root": run.parent}
    code = (
        "import sys, raymega.cli.main as m\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    sys.argv = ['raymega', *line.split()]\n"
        "    try: m.run()\n"
        "    except SystemExit: pass\n"
        "    print('DONE', line)\n"
    )
    lines = [
        " ".join(command).format(out=tmp_path / name, **arguments)
        for name, command in COMMANDS.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True,
        timeout=500, check=False, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert done.stdout.count("DONE") == len(COMMANDS), done.stderr
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(run)


def test_bomb_goes_off_where_pickles_are_read(tmp_path):
    """Or the test above shows nothing."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()
