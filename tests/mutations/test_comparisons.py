"""Each quantity that `raymega verify` compares finds a planted mistake, in the dtype in which the mistake shows."""

import re
from collections.abc import Iterator

import pytest

from raymega.verify.compare import LIMIT, Deviation, compare, make_reference
from raymega.verify.launch import ForkServer
from raymega.verify.legal_layouts import is_legal, reference_layout
from raymega.verify.resume import run_resumed
from raymega.verify.rounding import compare_with_spread, in_precision, measure_spread
from tests.mutations.comparisons import COMPARISONS, ComparedMutation
from tests.mutations.tree import ROOT, fork_server_of
from tests.unit.verify.jobs import make_job

pytestmark = pytest.mark.dist

STEPS = 2
TIMEOUT_S = 300.0
SMALL = ("model.num_layers=2", "data.global_batch_size=6", "optimizer.lr_warmup_steps=1")


def test_every_row_still_fits_the_package():
    texts = {row.name: (ROOT / "raymega" / row.file).read_text() for row in COMPARISONS}
    assert all(texts[row.name].count(row.old) == 1 for row in COMPARISONS)
    assert len(texts) == len(COMPARISONS)


@pytest.fixture(scope="module")
def healthy() -> Iterator[ForkServer]:
    """The fork server of the package as it is."""
    with fork_server_of(None, timeout_s=TIMEOUT_S) as fork_server:
        yield fork_server


def _found(fork_server: ForkServer, row: ComparedMutation) -> Deviation | None:
    """Return the first deviation as `raymega verify` finds it: of one rank below float64, else of the layout."""
    job = make_job(*SMALL, *row.job)
    with fork_server.run(job, reference_layout(job), steps=STEPS) as results:
        reference = make_reference(results[0])
    if row.precision == "float64":
        run = (
            run_resumed(fork_server, job, row.saved_on, row.layout, steps=STEPS)
            if row.saved_on
            else fork_server.run(job, row.layout, steps=STEPS)
        )
        with run as results:
            return compare(results, reference, limit=LIMIT).first
    job = in_precision(job, row.precision)
    spread = measure_spread(fork_server, job, reference, steps=STEPS)
    with fork_server.run(job, row.layout, steps=STEPS) as results:
        on_layout = compare_with_spread(results, reference, spread).first
    return spread.judge(row.precision, step=STEPS).first or on_layout


def _rows():
    """Every row; `make test` plants one in float64, as the spread of roundings takes five runs more."""
    for row in COMPARISONS:
        is_quick = row.precision == "float64"
        mark = pytest.mark.sample(1, of="comparisons") if is_quick else pytest.mark.wide
        yield pytest.param(row, id=row.name, marks=mark)


@pytest.mark.parametrize("row", list(_rows()))
def test_planted_mistake_is_found_by_its_own_comparison(row, healthy):
    assert is_legal(make_job(*SMALL, *row.job), row.layout)
    assert _found(healthy, row) is None
    with fork_server_of(row, timeout_s=TIMEOUT_S) as fork_server:
        found = _found(fork_server, row)
    assert found is not None and re.fullmatch(row.quantity, found.quantity), found
