"""Every planted mistake is caught: the run deviates from one rank by more than the limit."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from raymega.errors import NumericsError
from raymega.parallel.core.compile import can_fuse
from raymega.verify.compare import LIMIT, Reference, compare, make_reference
from raymega.verify.layout import Layout
from raymega.verify.legal_layouts import is_legal, reference_layout
from raymega.verify.shares import LayoutFailedError
from tests.mutations.kernels import KERNELS
from tests.mutations.mutation import Mutation
from tests.mutations.table import KINDS
from tests.mutations.tree import fork_server_of
from tests.unit.verify.jobs import make_job

pytestmark = pytest.mark.dist

STEPS = 2
TIMEOUT_S = 300.0
SMALL = ("model.num_layers=2", "data.global_batch_size=6", "optimizer.lr_warmup_steps=1")


@cache
def _job(overrides: tuple[str, ...]):
    return make_job(*SMALL, *overrides)


@pytest.fixture(scope="module")
def healthy() -> Iterator[dict]:
    """The nursery of the package as it is, and the references it has trained by overrides."""
    with fork_server_of(None, timeout_s=TIMEOUT_S) as fork_server:
        yield {"fork_server": fork_server}


def _reference(healthy: dict, overrides: tuple[str, ...]) -> Reference:
    if overrides not in healthy:
        job = _job(overrides)
        with healthy["fork_server"].run(job, reference_layout(job), steps=STEPS) as results:
            healthy[overrides] = make_reference(results[0])
    return healthy[overrides]


def _is_same_run(
    fork_server, overrides: tuple[str, ...], layout: Layout, reference: Reference
) -> bool:
    """Ranks that raise are a failure of the test: a mistake that is loud needs no comparison.

    But for numbers that are not finite: memory that is read too early may hold any.
    """
    try:
        with fork_server.run(_job(overrides), layout, steps=STEPS) as results:
            return compare(results, reference, limit=LIMIT).first is None
    except LayoutFailedError as error:
        if NumericsError.__name__ not in str(error):
            raise
        return False


def _rows():
    """Every row; `make test` plants one of each kind."""
    for kind, rows in KINDS.items():
        for row in rows:
            yield pytest.param(row, id=row.name, marks=pytest.mark.sample(1, of=kind))


@pytest.mark.parametrize("mutation", list(_rows()))
def test_planted_mistake_is_caught_and_the_healthy_package_passes(mutation, healthy):
    _check(mutation, healthy)


@pytest.mark.wide
@pytest.mark.parametrize("mutation", KERNELS, ids=lambda row: row.name)
def test_planted_mistake_is_caught_in_what_the_compiler_makes_of_it(mutation):
    if not can_fuse(torch.device("cpu")):
        pytest.skip("torch.compile finds no C++ compiler on this machine")
    with fork_server_of(None, timeout_s=TIMEOUT_S, is_compiled=True) as fork_server:
        _check(mutation, {"fork_server": fork_server}, is_compiled=True)


def _check(mutation: Mutation, healthy: dict, *, is_compiled: bool = False) -> None:
    assert is_legal(_job(mutation.job), mutation.layout)
    reference = _reference(healthy, mutation.job)
    assert _is_same_run(healthy["fork_server"], mutation.job, mutation.layout, reference)
    with fork_server_of(mutation, timeout_s=TIMEOUT_S, is_compiled=is_compiled) as fork_server:
        assert not _is_same_run(fork_server, mutation.job, mutation.layout, reference)
