"""Held-out loss computed a second way: one document at a time, with torch's own cross entropy.

It shares the model and the order of samples with `raymega.train.forward_backward.evaluate`, and nothing else: no
batch, no masked slot, no packed row, no schedule, no loss head. So it is the reference that layouts are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import cross_entropy

from raymega.config.data import DataSource
from raymega.config.schema import Job
from raymega.data.blends.mixture import Mixture
from raymega.data.open_split import open_split, shape_of
from raymega.data.samples import Samples
from raymega.model.pipeline_stage import StageModule
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.train.build import TrainingComponents
from raymega.verify.compare import EVAL_LOSS


def plain_eval_losses(parts: TrainingComponents) -> dict[str, float]:
    """Return the mean held-out losses of a run on one rank by name, in nats per token.

    Empty where the job evaluates nothing, and where a token's loss depends on the other tokens of its micro-batch
    (`depends_on_micro_batch_size`): there a document by itself has another loss.
    """
    job = parts.plan.job
    if not job.run.eval_samples or depends_on_micro_batch_size(job):
        return {}
    (module,) = parts.modules
    losses = {name: _loss(module, samples, job) for name, samples in _sets(job)}
    first = next(iter(losses))
    return {EVAL_LOSS: losses[first]} | {
        f"{EVAL_LOSS}/{name}": losses[name] for name in losses if name
    }


def _sets(job: Job) -> Iterator[tuple[str, Samples]]:
    """Yield each validation set and its samples, opened here anew; the blend's has no name."""
    shape, seed, vocab_size = shape_of(job.data), job.run.seed, job.model.vocab_size
    blends = [("", "valid", job.data.blends[:1])]
    if job.data.validation:
        blends = [
            (each.name, each.split, ((0, (DataSource(path=each.path),)),))
            for each in job.data.validation
        ]
    for name, split, blend in blends:
        mixture = Mixture(blend)
        sources = [
            open_split(path, split, shape, seed=seed, vocab_size=vocab_size)
            for path in mixture.datasets
        ]
        yield name, Samples(sources, mixture, seed=seed)


def _loss(module: StageModule, samples: Samples, job: Job) -> float:
    """Return the mean loss of a set's first samples, document by document."""
    loss_sum, num_labels = 0.0, 0
    module.eval()
    with torch.no_grad():
        for sample in range(min(job.run.eval_samples, samples.num_samples)):
            row = samples.row(sample)
            for start, stop in pairwise(accumulate(row.documents, initial=0)):
                tokens = torch.from_numpy(row.tokens[start:stop].copy())
                labels = torch.from_numpy(row.labels[start:stop].copy())
                counted = torch.from_numpy(row.mask[start:stop].copy())
                logits = module.logits(tokens[None], None)[:, 0]  # [length, V]
                losses = cross_entropy(logits, labels, reduction="none")
                loss_sum += float(losses[counted].sum())
                num_labels += int(counted.sum())
    module.train()
    return loss_sum / num_labels
