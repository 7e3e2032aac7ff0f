"""Steps of an imported model: ours on ranks, and the loop that anyone would write around torch.optim.AdamW.

Tests in tests/dist/model compare the two.
"""

import json

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from raymega.data.loader import Loader
from raymega.data.samples import open_samples
from raymega.messages import Requests
from raymega.optim.lr_schedule import learning_rate
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.entry import init_from
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.references import hf_models
from tests.support.references.plain_models import slices

LOGITS_LIMIT, TRAINING_LIMIT = 1e-10, 1e-9
STEPS = 3


def training_plan(model, layout, *options):
    """The plan of a run of a model section; its gradients are clipped and its weights decay."""
    return make_test_plan(
        *[
            f"model.{name}={json.dumps(value)}"
            for name, value in model.model_dump(mode="json").items()
        ],
        *layout_overrides(layout),
        "run.eval_samples=0",
        "optimizer.lr_warmup_steps=1",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0.3",
        "optimizer.eps=1e-6",
        "optimizer.max_grad_norm=0.5",
        *options,
    )


def train_rank(env, plan_json, numbers=("loss", "grad_norm")):
    """Values named by ``numbers`` of each step, and this rank's blocks of the trained weights; what is frozen must not move."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    init_from(parts, plan.job.checkpoint)
    before = [weights.values.clone() for weights in parts.frozen]
    state, curve = TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        # a loss that the model lacks is None, and 0 in a plain loop
        curve.append(tuple(getattr(outcome, name) or 0.0 for name in numbers))
    assert all(map(torch.equal, before, (weights.values for weights in parts.frozen)))
    return curve, [
        (block.tensor, block.box, block.values.numpy().copy())
        for block in parts.optimizer.blocks()
        if block.kind == "model"
    ]


def whole_weights(results):
    """The trained weights by name, put together from the ranks' blocks."""
    whole = {}
    for _, blocks in results:
        for tensor, box, values in blocks:
            target = whole.setdefault(tensor.name, np.full(tensor.shape, np.nan))
            target[slices(box)] = values
    return whole


def adamw_of(named, section):
    """torch's AdamW over (name, parameter) pairs; biases and norms do not decay."""
    # biases of all experts are matrices in shape alone
    is_vector = {name: p.ndim == 1 or name.endswith("bias") for name, p in named}
    decays = {False: section.weight_decay, True: 0.0}
    groups = [
        {"params": [p for name, p in named if is_vector[name] is kind], "weight_decay": decay}
        for kind, decay in decays.items()
    ]
    return torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps)


def clip_and_step(optimizer, plan, step):
    """Clip the gradients, take the step at its learning rate, and return their norm before."""
    section = plan.job.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # an indexer of transformers runs without gradients
    params = [param for param in params if param.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params])))
    for param in params:
        param.grad *= min(1.0, section.max_grad_norm / norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(section, total_steps=plan.job.run.steps, step=step)
    optimizer.step()
    return norm


def train_plainly(model, network, plan):
    """Losses and norms of the parameters of ``model`` that need gradients.

    ``network`` is what maps tokens to logits: the model, or what its adapters wrap.
    """
    optimizer = adamw_of(
        [(name, p) for name, p in model.named_parameters() if p.requires_grad], plan.job.optimizer
    )
    loader = Loader(open_samples(plan.job), dp_rank=0, device="cpu")
    curve, samples = [], 0
    for step in range(STEPS):
        batches = loader.micro_batches(plan.batch, samples)
        count = sum(int(batch.mask.sum()) for batch in batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            flat = hf_models.logits(network, batch.tokens).flatten(0, 1)
            labels = batch.labels.masked_fill(batch.mask == 0, -100).flatten()
            part = cross_entropy(flat, labels, reduction="sum") / count
            part.backward()
            loss += float(part.detach())
        norm = clip_and_step(optimizer, plan, step)
        curve.append((loss, norm))
        samples += plan.batch.global_batch_size
    return curve
