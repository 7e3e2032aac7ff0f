"""Held-out loss computed a second way: one document at a time, with torch's own cross entropy.

It shares the model and the order of samples with `raymega.train.forward_backward.evaluate`, and nothing else: no
batch, no masked slot, no packed row, no schedule, no loss head. So it is the reference that layouts are compared with.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch.nn.functional import cross_entropy

from raymega.data.blends.mixture import Mixture
from raymega.data.open_split import open_split, shape_of
from raymega.data.samples import Samples
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.train.build import TrainingComponents


def plain_eval_loss(parts: TrainingComponents) -> float | None:
    """Return the mean held-out loss of a run on one rank, in nats per token.

    None where the job evaluates nothing, and where a token's loss depends on the other tokens of its micro-batch
    (`depends_on_micro_batch_size`): there a document by itself has another loss.
    """
    job = parts.plan.job
    if not job.run.eval_samples or depends_on_micro_batch_size(job):
        return None
    (module,) = parts.modules
    # the validation split of each dataset of the first blend, opened here anew
    mixture, seed = Mixture(job.data.blends[:1]), job.run.seed
    sources = [
        open_split(path, "valid", shape_of(job.data), seed=seed, vocab_size=job.model.vocab_size)
        for path in mixture.datasets
    ]
    samples = Samples(sources, mixture, seed=seed)
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
