"""Every mistake that all layouts make alike turns each test red that its row names."""

import pytest

from tests.mutations.adapter_proofs import ADAPTER_PROOFS
from tests.mutations.base_blocks import BASE_BLOCK_PROOFS
from tests.mutations.distillation import DISTILLATION_PROOFS
from tests.mutations.encoders import ENCODER_PROOFS
from tests.mutations.families import FAMILIES
from tests.mutations.images import IMAGE_PROOFS
from tests.mutations.planted import WORDS_OF_DEATH, planted_text
from tests.mutations.proofs import PROOFS as PLAIN_PROOFS
from tests.mutations.states import STATES
from tests.mutations.tree import Tree
from tests.mutations.two_streams import TWO_STREAM_PROOFS

PROOFS = (
    *PLAIN_PROOFS,
    *FAMILIES,
    *STATES,
    *ENCODER_PROOFS,
    *TWO_STREAM_PROOFS,
    *DISTILLATION_PROOFS,
    *IMAGE_PROOFS,
    *ADAPTER_PROOFS,
    *BASE_BLOCK_PROOFS,
)
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"))


@pytest.mark.wide
def test_tests_of_the_table_pass_where_nothing_is_planted(tree):
    tests = sorted({test for row in PROOFS for test in row.tests})
    assert tree.verdict(tests, "--everything", timeout_s=TIMEOUT_S)[0] == "passed"


@pytest.mark.wide
@pytest.mark.parametrize("row", PROOFS, ids=lambda row: row.name)
def test_planted_mistake_turns_each_of_its_tests_red(row, tree):
    with tree.planted(row.file, planted_text(row)):
        for test in row.tests:
            verdict, said = tree.verdict([test], "--everything", timeout_s=TIMEOUT_S)
            assert verdict == "failed", f"{test} {verdict}: {said}"
            # The test must find what is wrong: that no name was found is no finding.
            assert not WORDS_OF_DEATH.search(said), f"{test} did not get that far: {said}"
