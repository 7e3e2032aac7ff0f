"""What the plan says of packed documents is what the cost model and the data say."""

import json

import pytest
from typer.testing import CliRunner

from raymega.cli.main import app
from raymega.data.samples import first_rows
from raymega.plan.packing.cost import pairs_of
from raymega.plan.packing.step_estimate import packed_step, step_cost, step_limits
from tests.support.jobs import VERIFY, make_test_plan

PACKED = (
    "data.packing=best_fit", "data.document_multiple=8", "parallel.pp=1", "parallel.dp=2",
    "parallel.cp=2", "schedule.micro_batch_size=1", "data.global_batch_size=4",
)  # fmt: skip


def test_one_document_a_row_is_the_row_without_documents():
    plan = make_test_plan(*PACKED)
    seq_len = plan.job.data.seq_len
    found = packed_step(plan, [[seq_len]] * 4)
    assert (found.num_documents, found.efficiency, found.attention_share) == (4, 1.0, 1.0)
    assert found.static_imbalance == 1.0 and found.dynamic is None
    one = step_cost(plan).seconds(tokens=seq_len // 2, pairs=pairs_of(seq_len), size=2)
    assert found.static_s == pytest.approx(2 * one)


def test_uneven_rows_make_ranks_wait_and_dynamic_ranks_less():
    plan = make_test_plan(*PACKED, "parallel.dynamic_cp=true")
    half = plan.job.data.seq_len // 8
    rows = [[plan.job.data.seq_len], [half] * 8] * 2
    found = packed_step(plan, rows)
    assert found.num_documents == 18 and found.static_imbalance > 1
    assert found.attention_share == pytest.approx(
        (2 * pairs_of(8 * half) + 16 * pairs_of(half)) / (4 * pairs_of(8 * half))
    )
    assert found.dynamic.seconds <= found.static_s and found.dynamic.most_ranks <= 4
    assert step_limits(plan).num_ranks == 4


def test_first_rows_are_the_documents_of_the_first_step():
    plan = make_test_plan(*PACKED)
    rows = first_rows(plan.job)
    assert len(rows) == 4 and all(0 < sum(row) <= plan.job.data.seq_len for row in rows)
    assert first_rows(make_test_plan("data.packing=none").job) == []
    assert first_rows(make_test_plan(*PACKED, "data.path=s3://team/tokens").job) == []


@pytest.mark.parametrize("more", [(), ("data.path=/nowhere",)], ids=["here", "not-here"])
def test_plan_tells_it_and_says_when_it_cannot(more):
    words = [
        word for text in (*PACKED, *more, "parallel.dynamic_cp=true") for word in ("--set", text)
    ]
    shown = CliRunner().invoke(app, ["plan", str(VERIFY), *words, "--json"])
    told = json.loads(shown.stdout)["packing"]
    assert ("unknown" in told) == bool(more)
    text = CliRunner().invoke(app, ["plan", str(VERIFY), *words]).stdout
    assert ("documents are not known here" in text) == bool(more)
    assert ("dynamic cp: " in text) != bool(more)
