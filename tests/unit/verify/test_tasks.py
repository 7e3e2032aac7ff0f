"""Tasks of a verification: which layouts have workers beside the run, and what is compared."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raymega.verify import plain_evaluation
from raymega.verify.layout import Layout
from raymega.verify.legal_layouts import is_legal, own_layout
from raymega.verify.shrink import shrink_job
from raymega.verify.tasks import GRIDS, compared_number, drawn_requests, legal_grids
from tests.unit.verify.jobs import make_job

EXPERTS = ("model.moe.num_experts=4", "model.moe.intermediate_size=16")


def _small(*overrides):
    job = make_job(*overrides)
    return job, shrink_job(job, steps=3, max_params=2_000_000, max_ranks=8, is_data_there=True).job


def test_each_grid_that_the_model_allows_may_evaluate_beside_the_run():
    job, small = _small("model.num_heads=3", "model.num_kv_heads=3", "model.hidden_size=48")
    assert legal_grids(job) == (), "a job without tasks"
    assert legal_grids(small) == tuple(grid for grid in GRIDS if "tp=2" not in grid)
    assert is_legal(small, Layout(dp=2, eval_tasks_on="beside", eval_tasks_grid="dp=3"))
    assert not is_legal(small, Layout(dp=2, eval_tasks_on="beside", eval_tasks_grid="tp=2"))


@pytest.mark.parametrize(
    "override", ["model.moe.capacity_factor=1.0", "precision.fp8=rowwise"], ids=["capacity", "fp8"]
)
def test_a_job_whose_scores_depend_on_more_than_the_request_has_no_tasks(override):
    _, small = _small(*EXPERTS, override)
    assert small.run.eval_tasks == ()
    assert not is_legal(small, Layout(dp=2, eval_tasks_on="beside"))


def test_the_jobs_own_layout_keeps_its_workers_beside_the_run():
    tasks = ("run.eval_tasks=[{task: lambada, path: here}]", "run.eval_tasks_on=beside")
    job, small = _small(*tasks, "run.eval_tasks_grid=dp=2")
    own = own_layout(job, small)
    assert (own.eval_tasks_on, own.eval_tasks_grid) == ("beside", "dp=2")
    # a grid that is none of those drawn gives way; dynamic context parallelism needs workers beside
    job, small = _small(*tasks, "run.eval_tasks_grid=pp=4")
    assert own_layout(job, small).eval_tasks_grid == GRIDS[0]
    dynamic = ("data.packing=best_fit", "parallel.cp=2", "parallel.dynamic_cp=true")
    job, small = _small(*dynamic, "data.document_multiple=4", "schedule.micro_batch_size=1")
    own = own_layout(job, small)
    assert own.eval_tasks_on == "beside" and is_legal(small, own)


def test_scores_that_change_places_change_the_compared_number():
    first, second = np.array([-1.0, -2.0]), np.array([-3.0])
    assert compared_number([first, second]) != compared_number([first[::-1], second])
    assert compared_number([first, second]) == pytest.approx((1 + 2 * 4 / 3 + 3 * 5 / 3) / 4)


def test_requests_are_windows_and_short_ones_that_fit_a_row():
    requests = drawn_requests(seq_len=16, vocab_size=70)
    assert [request.num_targets for request in requests[:5]] == [16, 4, 4, 4, 3]
    assert all(2 <= len(r.tokens) <= 17 and r.tokens.max() < 70 for r in requests)
    assert len({len(r.tokens) for r in requests}) > 4


def test_scores_of_a_narrower_dtype_are_computed_in_float64():
    logits = torch.randn(3, 1, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    module = SimpleNamespace(
        logits=lambda _tokens, _layout: logits, eval=lambda: None, train=lambda: None
    )
    request = SimpleNamespace(tokens=np.array([1, 2, 3, 4]), num_targets=2)
    found = plain_evaluation._log_probs(module, request)
    wanted = logits[:, 0].double().log_softmax(-1)[[1, 2], [3, 4]].numpy()
    assert found.dtype == np.float64 and np.array_equal(found, wanted)
