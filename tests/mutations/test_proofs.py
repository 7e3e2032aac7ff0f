"""Every mistake that all layouts make alike turns each test red that its row names."""

import pytest

from tests.mutations.proofs import PROOFS
from tests.mutations.tree import ROOT, Tree

TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"))


def test_every_row_still_fits_the_package():
    stale = [
        row.name for row in PROOFS if (ROOT / "raymega" / row.file).read_text().count(row.old) != 1
    ]
    assert not stale and len({row.name for row in PROOFS}) == len(PROOFS)


@pytest.mark.wide
def test_tests_of_the_table_pass_where_nothing_is_planted(tree):
    tests = sorted({test for row in PROOFS for test in row.tests})
    assert tree.verdict(tests, "--everything", timeout_s=TIMEOUT_S)[0] == "passed"


@pytest.mark.wide
@pytest.mark.parametrize("row", PROOFS, ids=lambda row: row.name)
def test_planted_mistake_turns_each_of_its_tests_red(row, tree):
    text = (ROOT / "raymega" / row.file).read_text()
    with tree.planted(row.file, text.replace(row.old, row.new)):
        for test in row.tests:
            verdict, said = tree.verdict([test], "--everything", timeout_s=TIMEOUT_S)
            assert verdict == "failed", f"{test} {verdict}: {said}"
