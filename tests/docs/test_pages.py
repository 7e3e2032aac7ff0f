"""Commands, their outputs, job files and Python of the pages: what they show is what happens."""

import re

import pytest

from raymega.config.load import parse_job, parse_mapping
from raymega.config.schema import Job
from raymega.config.yaml_text import read_yaml
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.run_plan import make_plan
from tests.docs.blocks import PAGES, ROOT, blocks, blocks_of
from tests.docs.commands import NOT_RUN, QUICK, RUNNABLE, parse_faults, reason
from tests.docs.running import (
    GENERATED,
    PLACE,
    faults_of_page,
    is_program,
    masked,
    page_folder,
    regenerated,
)
from tests.support.jobs import VERIFY

ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = [(block.where, command) for block in ALL for command in block.commands]
OF_OTHERS = (*GENERATED, "docs/smollm2.md")
"""Pages that other tests run."""
REST = [page for page in PAGES if page.relative_to(ROOT).as_posix() not in OF_OTHERS]
PAGE_TIMEOUT_S = 7200
"""Ends a page that hangs; on a machine with ten times the load pages take half an hour."""
HINT = "if this change is meant: make pages, and read the diff"


def _is_run(block, pattern):
    return any(not reason(each) and pattern.match(each) for each in block.commands)


def _cases(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


def test_every_command_is_run_or_listed_with_a_reason():
    unknown = [c for c in COMMANDS if not reason(c[1]) and not RUNNABLE.match(c[1])]
    assert unknown == [], "run it, or list it in NOT_RUN of tests/docs/commands.py"
    idle = [
        each for each in NOT_RUN if not any(re.search(each, command) for _, command in COMMANDS)
    ]
    assert idle == [], "no page has such a command"


def test_commands_write_where_the_tests_have_folders_of_their_own():
    run = [(at, command) for at, command in COMMANDS if not reason(command)]
    elsewhere = [
        (at, path)
        for at, command in run
        for path in re.findall(r"/tmp/\S*", command)
        if not path.startswith(PLACE)
    ]
    assert elsewhere == [], f"a second reader finds the first one's files there; begin with {PLACE}"


def test_options_of_every_command_exist():
    told = [f"{at}: {fault}" for at, command in COMMANDS for fault in parse_faults(command)]
    assert [each for each in told if "run.nam=x" not in each] == []
    assert len(told) == 1, "docs/job-file.md shows what is said of a field that no job has"


@pytest.mark.parametrize(
    "command", ["raymega plan a.yaml --gpus", "raymega paln a.yaml", "raymega data prepare --out x",
                "raymega train a.yaml --set run.stepps=2", "raymega schema && raymega train"],
)  # fmt: skip
def test_parser_refuses_what_the_command_line_refuses(command):
    assert parse_faults(command)


def test_table_of_benchmarks_has_the_command_of_every_script():
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"`python -m benchmarks\.(\w+)( [^`]*)?`", table)
    scripts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name, _ in rows} == {
        name for name, text in scripts.items() if 'if __name__ == "__main__":' in text
    }
    options = [(name, each) for name, words in rows for each in re.findall(r"--[\w-]+", words)]
    assert [each for each in options if f'"{each[1]}"' not in scripts[each[0]]] == []


def _report(faults):
    """Fail with all that the commands printed, which pytest would cut out of a comparison of lists."""
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


@_cases([page for page in REST if any(_is_run(block, QUICK) for block in blocks(page))])
def test_quick_commands_run(page):
    with page_folder() as folder:
        _report(faults_of_page(blocks(page), folder, only_quick=True))


@pytest.mark.wide
@pytest.mark.timeout(PAGE_TIMEOUT_S)
@_cases([p for p in REST if any(_is_run(b, RUNNABLE) or is_program(b) for b in blocks(p))])
def test_all_commands_run(page):
    with page_folder() as folder:
        _report(faults_of_page(blocks(page), folder, only_quick=False))


@pytest.mark.parametrize("page", GENERATED)
def test_quick_outputs_are_as_on_the_page(page):
    _compare(page, only_quick=True)


@pytest.mark.wide
@pytest.mark.timeout(PAGE_TIMEOUT_S)
@pytest.mark.parametrize("page", GENERATED)
def test_all_outputs_are_as_on_the_page(page):
    _compare(page, only_quick=False)


def _compare(page, *, only_quick):
    text = (ROOT / page).read_text(encoding="utf-8")
    with page_folder() as folder:
        made = regenerated(text, page, folder, only_quick=only_quick)
    assert masked(made) == masked(text), HINT


def test_output_that_differs_is_written():
    page = "```bash\nraymega schedule gpipe --pp 1 --micro-batches 1\n```\n\n```text\nnonsense\n```\nend\n"
    with page_folder() as folder:
        made = regenerated(page, "page.md", folder, only_quick=True)
        assert regenerated(made, "page.md", folder, only_quick=True) == made
    assert "gpipe: ranks 1" in made and "nonsense" not in made and made.endswith("\n```\nend\n")


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.language == "python" and b.text.startswith('"""')], ids=lambda b: b.where
)  # fmt: skip
def test_module_on_a_page_loads(block):
    exec(compile(block.text, block.where, "exec"), {"__name__": "on_a_page"})


def test_lines_of_a_file_on_a_page_name_a_file_that_there_is():
    shown = [b.text for b in ALL if b.language == "python" and b.text.startswith("# raymega/")]
    files = [re.match(r"# (raymega/[\w/]+\.py)", text)[1] for text in shown]
    assert files and [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "yaml"], ids=lambda b: b.where)
def test_job_on_a_page_is_read(block, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(re.sub(r"\.\.\., |, \.\.\.|^ *\.\.\.\n", "", block.text, flags=re.MULTILINE))
    shown = read_yaml(path.read_text())
    if "like" in shown:
        assert find_accelerator(str(path)).name == shown["name"]
        return
    if "task" in shown:  # of lm-eval
        assert shown.keys() >= {"dataset_path", "output_type", "doc_to_text", "metric_list"}
        return
    assert shown.keys() <= Job.model_fields.keys()
    if shown.keys() >= {"run", "model", "data", "optimizer"}:
        assert make_plan(parse_job(path).job()).grid.world_size >= 1
        return
    # Some sections, or fields of them: with the others of a whole job each must be one that there is.
    base = read_yaml(VERIFY.read_text())
    whole = {
        name: {**base.get(name, {}), **shown.get(name, {})}
        if shown.get(name) != "auto" else {"layout": "auto"}
        for name in {**base, **shown}
    }  # fmt: skip
    assert parse_mapping(whole).faults == ()


def test_blocks_are_found_and_commands_read():
    text = '# A\n\n```bash title="x"\na \\\n  b  # c\n\nd\n```\n\n    raymega plan x\n    y\n\n- z\n  ```yaml\n  q: 1\n  ```\n'
    first, second, third = blocks_of(text, "page.md")
    assert (first.title, first.line, first.commands) == ("x", 3, ["a b", "d"])
    assert (second.line, second.commands) == (10, ["raymega plan x", "y"])
    assert (third.language, third.text, third.commands) == ("yaml", "q: 1\n", [])
