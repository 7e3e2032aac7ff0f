"""Held-out loss and scores of tasks computed a second way: one document at a time, with torch's own cross entropy.

It shares the model and the order of samples with `raymega.train.forward_backward.evaluate`, the model and the requests
with `raymega.evaluate.worker`, and nothing else: no batch, no masked slot, no packed row, no schedule, no loss head. So
it is the reference that layouts are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raymega.config.data import DataSource
from raymega.config.preference import PreferenceSection
from raymega.config.schema import Job
from raymega.data.blends.mixture import Mixture
from raymega.data.heads.form import job_form
from raymega.data.images.image_batch import canvas
from raymega.data.open_split import open_split, shape_of
from raymega.data.row_rules.rules import row_rules
from raymega.data.rows import Row
from raymega.data.samples import Samples
from raymega.evaluate.requests import Request
from raymega.model.encoder_decoder import EncoderDecoderStage
from raymega.model.heads.contrastive import contrast_losses
from raymega.model.heads.score_losses import LOSSES as SCORE_LOSSES
from raymega.model.pipeline_stage import StageModule
from raymega.model.preference_losses import LOSSES, Answers
from raymega.model.vision_stage import VisionStage
from raymega.parallel.context_parallel.images import Images
from raymega.plan.fp8_layers import depends_on_micro_batch_size
from raymega.plan.layers.family_parts import parts_of, score_pooling
from raymega.train.build import TrainingComponents
from raymega.train.evaluation.average import averaged_weights
from raymega.verify.compare import EVAL_EMA_LOSS, EVAL_LOSS
from raymega.verify.tasks import TASK_SCORES, Floats, compared_number, drawn_requests


def plain_eval_losses(parts: TrainingComponents) -> dict[str, float]:
    """Return the mean held-out losses of a run on one rank by name, in nats per token, and the number of its tasks.

    Empty where the job evaluates nothing, and where a token's loss depends on the other tokens of its micro-batch
    (`depends_on_micro_batch_size`): there a document by itself has another loss.
    """
    job, found = parts.plan.job, dict[str, float]()
    if depends_on_micro_batch_size(job):
        return {}
    (module,) = parts.modules
    if job.run.eval_samples:
        found |= _held_out_losses(module, job, EVAL_LOSS)
    if job.run.eval_ema:
        with averaged_weights(parts):
            found |= _held_out_losses(module, job, EVAL_EMA_LOSS)
    if job.run.eval_tasks:
        requests = drawn_requests(seq_len=job.data.seq_len, vocab_size=job.model.vocab_size)
        found[TASK_SCORES] = compared_number([_log_probs(module, each) for each in requests])
    return found


def _held_out_losses(module: StageModule, job: Job, title: str) -> dict[str, float]:
    """Return the mean loss of the first validation set under ``title``, and of each named set under that and its name."""
    mean = _pair_loss if job.preference.is_on else _loss
    mean = _score_loss if job.model.head.is_on else mean
    losses = {name: mean(module, samples, job) for name, samples in _sets(job)}
    named = {f"{title}/{name}": loss for name, loss in losses.items() if name}
    return {title: next(iter(losses.values()))} | named


def _log_probs(module: StageModule, request: Request) -> Floats:
    """Return the log-probability of each target of a request."""
    tokens = torch.from_numpy(request.tokens)
    module.eval()
    with torch.no_grad():
        logits = module.logits(tokens[None, :-1], None)[:, 0].double()  # [length, V]
        losses = cross_entropy(logits, tokens[1:], reduction="none")
    module.train()
    return -losses[-request.num_targets :].numpy()


def _sets(job: Job) -> Iterator[tuple[str, Samples]]:
    """Yield each validation set and its samples, opened here anew; the blend's has no name."""
    shape, seed, vocab_size = (
        shape_of(job.data, job.preference, job_form(job)),
        job.run.seed,
        job.model.vocab_size,
    )
    blends = [("", "valid", job.data.blends[:1])]
    if job.data.validation:
        blends = [
            (each.name, each.split, ((0, (DataSource(path=each.path),)),))
            for each in job.data.validation
        ]
    for name, split, blend in blends:
        mixture = Mixture(blend)
        sources = [
            open_split(path, split, shape, seed=seed, vocab_size=vocab_size, plugins=job.plugins)
            for path in mixture.datasets
        ]
        rules, block_bytes = row_rules(job, split), job.data.shuffle_block_bytes
        yield name, Samples(sources, mixture, seed=seed, block_bytes=block_bytes, rules=rules)


def _loss(module: StageModule, samples: Samples, job: Job) -> float:
    """Return the mean loss of a set's first samples, document by document."""
    loss_sum, num_labels = 0.0, 0
    module.eval()
    with torch.no_grad():
        for sample in range(min(job.run.eval_samples, samples.num_samples)):
            row = samples.row(sample)
            for each in _document_losses(module, row):
                loss_sum += float(each.sum())
                num_labels += len(each)
    module.train()
    return loss_sum / num_labels


def _document_losses(module: StageModule, row: Row) -> Iterator[Tensor]:
    """Yield the losses of each document's labels that count, of one document at a time."""
    if row.stream_documents is not None:
        yield from _target_losses(module, row)
        return
    images = _images_of(module, row)
    for start, stop in pairwise(accumulate(row.documents, initial=0)):
        tokens = torch.from_numpy(row.tokens[start:stop].copy())
        labels = torch.from_numpy(row.labels[start:stop].copy())
        counted = torch.from_numpy(row.mask[start:stop].copy())
        types = None
        if row.token_types is not None:
            types = torch.from_numpy(row.token_types[None, start:stop].copy())
        if images is None:
            logits = module.logits(tokens[None], None, types)[:, 0].double()  # [length, V]
        else:
            here = images._replace(places=images.places[:, start:stop])
            logits = cast(VisionStage, module).document_logits(tokens, here)[:, 0].double()
        yield cross_entropy(logits, labels, reduction="none")[counted]


def _images_of(module: StageModule, row: Row) -> Images | None:
    """Return a row's images, with the place of each of its tokens; None where it has none."""
    if not row.images or row.image_places is None:
        return None
    # each has the room of the largest that there may be, so that places are the row's own
    vision = cast(VisionStage, module).vision
    size, square = vision.num_patches, vision.sizes.square
    pixels, grids = canvas(row.images, len(row.images), size, square)
    places = torch.from_numpy(row.image_places[None].copy())
    return Images(torch.from_numpy(pixels), torch.from_numpy(grids), places)


def _target_losses(module: StageModule, row: Row) -> Iterator[Tensor]:
    """Yield the losses of each document's target in a row of two streams, without padding and other documents."""
    assert isinstance(module, EncoderDecoderStage), "the row is of such a model"
    assert row.stream_documents is not None, "the row has two streams"
    size = row.documents[0]
    for number in np.unique(row.stream_documents[row.stream_documents >= 0]):
        here = row.stream_documents == number
        here[size:] &= row.mask[size:]
        source, target = (
            torch.from_numpy(row.tokens[side][here[side]])
            for side in (slice(size), slice(size, None))
        )
        logits = module.document_logits(source, target)[:, 0].double()  # [length, V]
        labels = torch.from_numpy(row.labels[size:][here[size:]])
        yield cross_entropy(logits, labels, reduction="none")


def _pair_loss(module: StageModule, samples: Samples, job: Job) -> float:
    """Return the mean loss of the pairs in a set's first samples, by the loss's formula on answers alone."""
    section, found = job.preference, list[Answers]()

    def sums(row: Row) -> Tensor:
        losses = [-each.sum() for each in _document_losses(module, row)]
        return torch.stack(losses[: 2 * row.num_pairs]).view(-1, 2)

    module.eval()
    with torch.no_grad():
        for sample in range(min(job.run.eval_samples, samples.num_samples)):
            row = samples.row(sample)
            policy = sums(row)
            counts = [len(each) for each in _document_losses(module, row)][: 2 * row.num_pairs]
            module.adapters.is_off = True
            reference = sums(row) if section.needs_reference else torch.zeros_like(policy)
            module.adapters.is_off = False
            if row.reference is not None:
                reference = torch.from_numpy(row.reference).view(-1, 2)
            labels = torch.tensor(counts, dtype=policy.dtype).view(-1, 2)
            classes = None if row.classes is None else torch.from_numpy(row.classes).double()
            found.append(
                Answers(policy=policy, reference=reference, counts=labels, is_desirable=classes)
            )
    module.train()
    return _mean_pair_loss(found, section)


def _mean_pair_loss(found: Sequence[Answers], section: PreferenceSection) -> float:
    """Return the mean loss of the pairs that count; kto's divergence is that of all answers to other prompts."""
    policy, reference, counts = (
        torch.cat([getattr(each, name) for each in found])
        for name in ("policy", "reference", "counts")
    )
    is_kto = section.loss_type == "kto"
    is_counted = counts[:, 0] > 0 if is_kto else (counts > 0).all(1)
    labels = [each.is_desirable for each in found if each.is_desirable is not None]
    ratios = (policy - reference)[:, 1][counts[:, 1] > 0]
    answers = Answers(
        policy=policy[is_counted],
        reference=reference[is_counted],
        counts=counts[is_counted],
        is_desirable=torch.cat(labels)[is_counted] if labels else None,
        divergence=ratios.mean().clamp(min=0) if is_kto else None,
    )
    return float(LOSSES[section.loss_type](answers, section).mean())


def _score_loss(module: StageModule, samples: Samples, job: Job) -> float:
    """Return the mean loss of a head's documents or tokens in a set's first samples, by its formula on one at a time."""
    losses, states, kind = list[Tensor](), list[Tensor](), job.model.head.kind
    is_causal = parts_of(job.model).is_causal
    module.eval()
    with torch.no_grad():
        for sample in range(min(job.run.eval_samples, samples.num_samples)):
            row, starts = samples.row(sample), accumulate(samples.row(sample).documents, initial=0)
            found, pooling = list[Tensor](), score_pooling(job.model)
            for start, length, padded in zip(starts, row.lengths, row.documents, strict=False):
                # an encoder's tokens see padding, which a short document has
                here = slice(start, start + (length if is_causal else padded))
                tokens = torch.from_numpy(row.tokens[here].copy())
                scores = module.logits(tokens[None], None)[:length, 0].double()
                if pooling == "none":
                    labels, counted = (
                        torch.from_numpy(a[here][:length].copy()) for a in (row.labels, row.mask)
                    )
                    losses.append(cross_entropy(scores, labels, reduction="none")[counted])
                else:
                    pooled = {"last": scores[-1], "first": scores[0], "mean": scores.mean(0)}
                    found.append(pooled[pooling])
            if kind == "embedding":
                states += found
            elif found:
                classes = (
                    torch.zeros(row.num_pairs)
                    if row.classes is None
                    else torch.from_numpy(row.classes)
                )
                whole = torch.stack(found).view(row.num_pairs, -1)
                losses.append(SCORE_LOSSES[kind](whole, classes, job.preference)[0])
    if states:  # of the whole set, in which each pair has the others as negatives
        losses.append(contrast_losses(torch.stack(states), job.model.head)[0])
    module.train()
    return float(torch.cat(losses).mean())
