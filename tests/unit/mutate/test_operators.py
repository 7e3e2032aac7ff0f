"""The mutation engine: each operator plants what it says, drawn alike each time; the nearest tests of a file."""

import ast

import pytest

from tests.mutate.__main__ import draw
from tests.mutate.nearest import nearest_tests
from tests.mutate.operators import OPERATORS, places, plant

SOURCE = '''
def f(x, group, items):
    """Return 3 * x, summed."""
    total = x * 2
    total = all_reduce(total, group.tp)
    if total > 0:
        total = total.to(torch.float64)
    for item in items:
        total += item
    total -= (x - 5).log()
    log.info("3 * %s", 4)
    return total.sum(dim=0)
'''
WANTED = {
    "drop a factor": ["total = x * 2 -> total = x", "total -= (x - 5).log() -> total -= x.log()"],
    "swap axes": [
        "total = all_reduce(total, group.tp) -> total = all_reduce(total, group.cp)",
        "return total.sum(dim=0) -> return total.sum(dim=1)",
    ],
    "skip a group": [
        "total = all_reduce(total, group.tp) -> total = total", "if total > 0: -> if False:",
        "if total > 0: -> if True:", "for item in items: -> for item in list(items)[:-1]:",
    ],
    "off by one": [
        "total = x * 2 -> total = x * 3", "if total > 0: -> if total > 1:", "if total > 0: -> if total >= 0:",
        "total -= (x - 5).log() -> total -= (x - 6).log()",
        "return total.sum(dim=0) -> return total.sum(dim=1)",
    ],
    "stale value": [
        "total = all_reduce(total, group.tp) -> pass", "total += item -> pass",
        "total -= (x - 5).log() -> pass",
        "total = total.to(torch.float64) -> pass",
    ],
    "wrong dtype": [
        "total = total.to(torch.float64) -> total = total",
        "total = total.to(torch.float64) -> total = total.to(torch.float32)",
    ],
}  # fmt: skip


LEFT_ALONE = """
def refused(x, rows) -> Fault | None:
    return Fault(fact=f"{x * 2} rows") if x > 2 else None


def name(number) -> str:
    return "none" if number < 1 else f"{number + 1}"


def kind(x, form):
    if x.numel() > 7:
        raise ValueError("more than 8")
    if x.numel() > 6:
        log.warning("many")
    raise_faults(PlanError, faults_of(x[0]))
    if not isinstance(x, list):
        return form.wait(x, timeout_s=6)
    return x.dtype in (torch.float32, torch.float64)
"""


def test_texts_refusals_types_and_waits_are_left_alone():
    assert places(LEFT_ALONE) == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_plants_what_it_says_and_leaves_texts_alone(operator):
    numbers = [number for name, number, _ in places(SOURCE) if name == operator]
    found = [plant(SOURCE, operator, number) for number in numbers]
    assert sorted(text for _, text in found) == sorted(WANTED[operator])
    for changed, _ in found:
        ast.parse(changed)
        assert '"""Return 3 * x, summed."""' in changed and "'3 * %s', 4" in changed


@pytest.mark.wide
def test_a_draw_is_a_function_of_its_seed_and_a_longer_one_goes_on():
    few, more, other = draw(5, 3), draw(8, 3), draw(5, 4)
    assert more[:5] == few != other
    assert len({each["key"] for each in more}) == 8


@pytest.mark.wide
@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("optim/muon.py", "tests/unit/optim/test_muon.py"),
        ("model/attention/core_attention.py", "tests/unit/model/attention/test_core_attention.py"),
        ("train/state.py", "tests/unit/train/test_state.py"),
        ("optim/clip.py", "tests/dist/model/test_train_statistics.py"),
        ("parallel/context_parallel/transfers.py", "tests/dist/parallel/test_context_attention.py"),
    ],
)
def test_nearest_tests_are_those_of_the_name_and_those_that_use_it(file, test):
    assert test in nearest_tests(file)
