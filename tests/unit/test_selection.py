"""Cases are drawn anew by each commit, and equally by everyone who has it."""

import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies

from tests.support.selection import draw_fewer_examples, renewed, seed_of_commit


def _git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_seed_follows_from_the_files_of_the_last_commit(tmp_path):
    _git(tmp_path, "init")
    seeds = []
    for text, message in (("one", "first"), ("two", "second"), ("one", "third")):
        (tmp_path / "file").write_text(text)
        _git(tmp_path, "add", "file")
        _git(tmp_path, "commit", "-m", message)
        seeds.append(seed_of_commit(tmp_path))
    assert seeds[0] == seeds[2] != seeds[1]


def test_folder_without_git_has_a_random_seed(tmp_path):
    assert len({seed_of_commit(tmp_path) for _ in range(8)}) > 1


@pytest.mark.parametrize(("examples", "fewer"), [(400, 100), (24, 10), (3, 3)])
def test_a_quarter_of_the_examples_is_drawn_and_once_for_all_cases(examples, fewer):
    drawn = []

    @settings(max_examples=examples, database=None)
    @given(strategies.integers())
    def test(number):
        drawn.append(number)

    draw_fewer_examples([SimpleNamespace(obj=test), SimpleNamespace(obj=test), SimpleNamespace()])
    test()
    assert len(drawn) == fewer


def test_costs_of_a_sampled_run_replace_those_of_its_functions_alone(tmp_path):
    here = "tests/unit/test_selection.py"
    cases = "".join(
        f'<testcase classname="tests.unit.test_selection" name="{name}" time="{time}"/>'
        for name, time in (("long[a]", 4.0), ("long[b]", 2.0), ("cheap_now", 0.01))
    )
    (tmp_path / "junit.xml").write_text(f"<testsuite>{cases}</testsuite>")
    known = {here: 3.0, f"{here}::cheap_now": 5.0, f"{here}::not_drawn": 7.0, "tests/gone.py": 9.0}
    assert renewed(known, [tmp_path / "junit.xml"]) == {
        here: 3.0, f"{here}::long": 3.0, f"{here}::not_drawn": 7.0
    }  # fmt: skip
