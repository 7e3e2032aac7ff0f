"""A step of distillation on one rank: its loss by the formula, and a teacher that is only read."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from raymega.messages import Requests
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

CPU = torch.device("cpu")
TEACHER = (
    "{family: llama, num_layers: 3, hidden_size: 48, num_heads: 4, ffn_hidden_size: 40, vocab_size: 250, "
    "max_positions: 64}"
)


def _plan(*options):
    return make_test_plan(
        *layout_overrides("tp1"), "model.vocab_size=250", f"distillation.teacher_model={TEACHER}",
        "data.global_batch_size=4", "optimizer.lr_warmup_steps=0", *options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_loss_is_that_of_the_formula(kind):
    plan = _plan(
        f"distillation.loss_type={kind}", "distillation.weight=0.6", "distillation.temperature=2.5"
    )
    parts = build_parts(plan, rank=0, groups=ALONE, device=CPU)
    (model,), (teacher,) = parts.modules, parts.teacher.weights.modules
    batches, sums = parts.loader.micro_batches(plan.batch, 0), torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            own, wanted = (
                each.logits(batch.tokens, None).transpose(0, 1) for each in (model, teacher)
            )
            assert own.shape[-1] == 250, "padding is no token"
            q, p = ((each / 2.5).log_softmax(-1) for each in (own, wanted))
            if kind == "reverse_kl":
                p, q = q, p
            sums[0] += (p.exp() * (p - q)).sum()
            sums[1] += cross_entropy(own.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    divergence, entropy = (sums / sum(batch.num_counted for batch in batches)).tolist()
    assert divergence > 1e-3, "two models"
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    assert outcome.pair_means["divergence"] == pytest.approx(divergence, rel=1e-12)
    assert outcome.pair_means["cross_entropy"] == pytest.approx(entropy, rel=1e-12)
    wanted = 0.6 * 2.5**2 * divergence + 0.4 * entropy
    assert outcome.loss == pytest.approx(wanted, rel=1e-12)


def test_a_teacher_is_read_and_nothing_else():
    """No step changes it, no buffer and no checkpoint holds anything of it, and an evaluation leaves it out."""
    plan = _plan(
        "distillation.loss_type=forward_kl", "distillation.weight=1", "run.eval_samples=4", "optimizer.lr=3e-3"
    )  # fmt: skip
    parts = build_parts(plan, rank=0, groups=ALONE, device=CPU)
    weights = [
        param
        for module in parts.teacher.weights.modules
        for param in module.parameters()
        if isinstance(param, ShardedParameter)
    ]
    before, state = [weight.detach().clone() for weight in weights], TrainState()
    divergences = []
    for _ in range(4):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        divergences.append(outcome.pair_means["divergence"])
    assert divergences[-1] < divergences[0], "the model comes nearer"
    assert all(map(torch.equal, before, weights))
    assert all(weight.grad is None and weight.spec.is_frozen for weight in weights)
    shapes = {block.tensor.shape for block in parts.optimizer.blocks()}
    assert not any(48 in shape for shape in shapes), "the run saves its own model alone"
    # a held-out loss is that of the labels
    (model,), (batch, loader) = parts.modules, parts.evaluation.sets[""]
    losses, count = 0.0, 0
    with torch.no_grad():
        for each in loader.micro_batches(batch, 0):
            logits = model.logits(each.tokens, None).transpose(0, 1)
            found = cross_entropy(logits.flatten(0, 1), each.labels.flatten(), reduction="none")
            losses += float((found * each.mask.flatten()).sum())
            count += each.num_counted
    assert evaluate(parts)["eval/loss"] == pytest.approx(losses / count, rel=1e-12)
