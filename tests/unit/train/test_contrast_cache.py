"""A step of embeddings: several micro-batches give the gradient of one loss over all of them."""

import pytest
import torch

from raymega.messages import Requests
from raymega.model.heads.contrastive import contrast_losses
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

CPU = torch.device("cpu")


def _plan(*options):
    return make_test_plan(
        *layout_overrides("tp1"), "data.packing=best_fit", "data.packing_window=64", "data.document_multiple=4",
        "data.seq_len=40", "data.global_batch_size=4", "schedule.micro_batch_size=1", "run.eval_samples=0",
        "optimizer.max_grad_norm=0.0", "model.head={kind: embedding, pooling: mean}", *options,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_train_as_one_graph(size):
    plan = _plan(f"schedule.micro_batch_size={size}")
    parts, other = (build_parts(plan, rank=0, groups=ALONE, device=CPU) for _ in range(2))
    (module,) = other.modules
    params = [param for param in module.parameters() if param.requires_grad]
    for param in params:  # whose gradients autograd returns
        param.grad_sink = None
    # one graph over the whole batch
    batches = other.loader.micro_batches(plan.batch, 0)
    assert len(batches) == 4 // size
    sums = [
        module.head.document_sums(module.evaluated(batch, None), batch.pairs) for batch in batches
    ]
    losses, is_right = contrast_losses(torch.cat(sums), plan.job.model.head)
    grads = torch.autograd.grad(losses.mean(), params, allow_unused=True)
    norm = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm()
    # the step
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    assert len(losses) > 4
    assert outcome.loss == pytest.approx(losses.mean().item(), rel=1e-12)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-10)
    assert outcome.pair_means["accuracy"] == pytest.approx(is_right.mean().item())
