"""Images shared out over data-parallel ranks: the run is that of ranks that each read their own, and the work is even."""

import numpy as np
import pytest

from raymega.data.loader import Loader
from raymega.data.rows import TEXT
from raymega.data.samples import open_samples
from raymega.plan.run_plan import read_plan
from raymega.train.build import image_share
from tests.mutations.images import LLAVA, SEVERAL
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.references.plain_training import TRAINING_LIMIT, train_rank, whole_weights

pytestmark = pytest.mark.dist
LAYOUTS = ("dp3", "tp2-dp2", "cp2-dp2", "dp2-pp2")
OPTIONS = {
    "dp3": ("parallel.sharding=parameters",),
    "tp2-dp2": ("parallel.sequence_parallel=true",),
    "cp2-dp2": ("memory.recompute=full",),
}


JOBS = {"one size": LLAVA, "several": SEVERAL}


def _plan(layout, *options, job=LLAVA):
    return make_test_plan(
        *job, *layout_overrides(layout), "run.eval_samples=0", "optimizer.lr=1e-2", *options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_balanced_run_is_the_unbalanced_one(layout, job):
    found = []
    for is_balanced in (False, True):
        options = [*OPTIONS.get(layout, ()), f"parallel.balance_images={str(is_balanced).lower()}"]
        plan = _plan(layout, *options, job=job)
        found.append(run_grid(train_rank, plan.grid, plan.to_json()))
    (plain, _), (even, _) = found[0][0], found[1][0]
    np.testing.assert_allclose(even, plain, rtol=TRAINING_LIMIT)
    wanted = whole_weights(found[0])
    for name, values in whole_weights(found[1]).items():
        np.testing.assert_allclose(
            values, wanted[name], rtol=TRAINING_LIMIT, atol=TRAINING_LIMIT, err_msg=name
        )


CUT_LAYOUTS = {
    "tp2": (),
    "tp2-cp2": ("parallel.sequence_parallel=true", "memory.recompute=full"),
    "tp2-dp2": ("parallel.sequence_parallel=true", "parallel.balance_images=true", "parallel.sharding=optimizer"),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", CUT_LAYOUTS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_tower_that_tp_cuts_trains_the_run_of_one_rank(layout, job):
    cut = (*job[:-1], job[-1].replace("{kind", "{tensor_parallel: true, kind"))
    one, cut = _plan("tp1", job=job), _plan(layout, *CUT_LAYOUTS[layout], job=cut)
    assert cut.job.model.vision.tensor_parallel
    (wanted, _), *_ = found = run_grid(train_rank, one.grid, one.to_json())
    whole = whole_weights(found)
    found = run_grid(train_rank, cut.grid, cut.to_json())
    np.testing.assert_allclose(found[0][0], wanted, rtol=TRAINING_LIMIT)
    held = {tensor.name: box.shape for tensor, box, _ in found[0][1]}
    assert layout == "tp2-dp2" or held["vision.layers.0.mlp.up.weight"] == (16, 16), "half of it"
    for name, values in whole_weights(found).items():
        np.testing.assert_allclose(
            values, whole[name], rtol=TRAINING_LIMIT, atol=TRAINING_LIMIT, err_msg=name
        )


def _counts(plan, *, is_balanced):
    """Images that each dp rank's tower reads of each micro-batch of a step, [micro-batches, dp]."""
    job = plan.job.with_values(parallel={"balance_images": is_balanced})
    plan = read_plan(plan.to_json()).__class__(**{**_fields(plan), "job": job})
    found = []
    for rank in range(plan.grid.dp):
        loader = Loader(
            open_samples(job), dp_rank=rank, device="cpu", images=image_share(plan, rank)
        )
        batches = loader.micro_batches(plan.batch, 0)
        for batch in batches:
            images = batch.rows.images
            # features come for exactly the images of this rank's own tokens
            own = int((images.places != TEXT).sum()) // job.model.vision.num_patches
            assert not is_balanced or sum(images.received) == own
        found.append([len(batch.rows.images.pixels) for batch in batches])
    return np.array(found).T


def _fields(plan):
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_each_rank_reads_as_many_images_and_fewer_than_the_busiest_one():
    plan = _plan("dp3", "data.global_batch_size=24", "schedule.micro_batch_size=2")
    own, even = (_counts(plan, is_balanced=each) for each in (False, True))
    assert (even == even[:, :1]).all()
    assert even.sum() <= own.max(1).sum() * plan.grid.dp
    assert even[:, 0].sum() < own.max(1).sum(), "a step waits for the busiest rank"
