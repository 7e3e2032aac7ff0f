"""What users see and programs rely on is, byte for byte, what lies in tests/golden/files."""

import pytest

from tests.golden.compare import HINT, difference, stored_names
from tests.golden.faults import idle_rules
from tests.golden.produce import REFUSALS, units
from tests.golden.refusals import refused
from tests.golden.sites import all_sites, problems

UNITS = {unit.name: unit for unit in units()}


def _check(unit):
    texts = unit.make()
    assert texts.keys() == set(unit.files)
    found = difference(texts)
    assert not found, f"\n{found}"


@pytest.mark.parametrize("name", [name for name in UNITS if name != REFUSALS])
def test_output_is_as_before(name):
    _check(UNITS[name])


def test_mistakes_are_told_as_before_and_every_place_that_makes_a_fault_is_known():
    """All at once, as the cases are asked once."""
    missing = [*refused().wrong, *problems(refused().reached, "\n".join(refused().texts.values()))]
    assert not missing, "\n".join(missing)
    assert len(all_sites()) > 400, "the places are not found"
    _check(UNITS[REFUSALS])


def test_every_rule_refuses_a_case():
    """Rows that share a check as well."""
    assert idle_rules() == []


def test_no_golden_is_left_over():
    wanted = {name for unit in UNITS.values() for name in unit.files}
    assert sorted(stored_names() - wanted) == [], HINT
