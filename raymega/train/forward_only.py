"""Forward passes without training: micro-batches through the pipeline, and what the last stage returns for each.

One of them gives a step's pairs their reference log-probabilities, by the frozen weights under the adapters. It has no
dropout, no noise and no adapters, and its results stay on the ranks of the last stage, where the loss is. Another one
has the embeddings of a whole batch, each of which is in the losses of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from raymega.config.heads.section import HeadSection
from raymega.model.heads.contrastive import contrast_of
from raymega.model.heads.score_head import ScoreHead, language_head
from raymega.model.pipeline_stage import StageModule
from raymega.model.preference import own_log_probs, sum_over_context
from raymega.parallel.comm.collectives import all_gather, all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.context_parallel.context import (
    Contrast,
    MicroBatch,
    PairBatch,
    ScoreBatch,
)
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.run_plan import RunPlan
from raymega.schedule.table import make_forward_only

T = TypeVar("T")
AddReference = Callable[[Sequence[MicroBatch]], list[MicroBatch]]
"""Function that returns micro-batches whose pairs have reference log-probabilities."""


@dataclass
class _Reading:
    """Function that reads a pass on the last stage, and the results of one.

    Apart from the pipeline, whose stages would else hold it in a cycle, with the results of its last pass.
    """

    read: Callable[..., Any] = StageModule.score
    found: list[Any] = field(default_factory=list)


class ForwardOnly:
    """Forward-only pipeline of one rank.

    Args:
        plan: Plan of the grid.
        pp_rank: Pipeline coordinate of this rank.
        modules: Model chunks of this rank, in the order of their stages.
        p2p: Transfers between the stages.
        before_pass: Function that is called with the executor before each pass.
        progress: Callback after each instruction.
    """

    def __init__(  # the two assemblers call it
        self,
        plan: RunPlan,
        pp_rank: int,
        *,
        modules: Sequence[StageModule],
        p2p: PointToPoint,
        before_pass: Callable[[Executor[MicroBatch]], None] = lambda _executor: None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.modules = tuple(modules)
        self._before_pass = before_pass
        self._reading = _Reading()
        stage_fns = [_stage_fn(module, self._reading) for module in modules]

        @cache
        def executor_for(num_micro_batches: int) -> Executor[MicroBatch]:
            program = make_forward_only(plan.placement, num_micro_batches)
            return Executor(program.lists[pp_rank], stage_fns, p2p, progress=progress)

        self._executor_for = executor_for

    def run(
        self,
        read: Callable[[StageModule, MicroBatch, Tensor | None], Tensor | T],
        micro_batches: Sequence[MicroBatch],
    ) -> list[T]:
        """Return what ``read`` returns for each micro-batch on the last stage, in order; none elsewhere.

        On other stages ``read`` returns the activation for the next one.
        """
        found: list[T] = []
        self._reading.read, self._reading.found = read, found
        # run the forward passes; the last stage's results gather in ``found``
        executor = self._executor_for(len(micro_batches))
        self._before_pass(executor)
        lengths = [*map(self.modules[0].carried_length, micro_batches)]
        executor.run(micro_batches, is_recording=False, lengths=lengths)
        self._reading.found = []
        return found


def _stage_fn(
    module: StageModule, reading: _Reading
) -> Callable[[MicroBatch, Tensor | None], Tensor]:
    def run(micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        output = reading.read(module, micro_batch, hidden)
        if module.head is None:
            assert isinstance(output, Tensor), "a stage before the last returns its activation"
            return output
        # An executor adds up losses, and this pass has none.
        reading.found.append(output)
        return torch.zeros((), device=micro_batch.tokens.device)

    return run


def no_reference(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches as they are: the loss needs no reference, or the data have it."""
    return list(micro_batches)


def reference_by_base(forward: ForwardOnly) -> AddReference:
    """Return the function that computes the reference with the weights under the adapters."""

    def add(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        with _without_adapters(forward.modules):
            found: list[Tensor] = forward.run(answer_log_probs, micro_batches)
        if not found:  # not the last stage
            return list(micro_batches)
        return [
            batch
            if not isinstance(batch.pairs, PairBatch)
            else replace(batch, pairs=replace(batch.pairs, reference=sums))
            for batch, sums in zip(micro_batches, found, strict=True)
        ]

    return add


def with_baseline(
    add: AddReference, forward: ForwardOnly, world: Group, tp_rank: int, device: torch.device
) -> AddReference:
    """Return ``add``, followed by kto's estimate of the divergence from the reference on a whole batch.

    A further pass has the log-probabilities of answers to other prompts, by the weights that are trained.

    Args:
        add: Function that adds the reference.
        forward: Forward-only pipeline of the rank.
        world: All ranks.
        tp_rank: Tensor-parallel coordinate; the first one counts.
        device: Device of the rank, whose stages may have no weights.
    """

    def add_baseline(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        batches = add(micro_batches)
        found: list[Tensor] = forward.run(answer_log_probs, batches)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for batch, policy in zip(batches, found, strict=False):
            if isinstance(pairs := batch.pairs, PairBatch):
                sums += _baseline_sums(pairs, policy)
        first = (batches[0].rows.context or forward.modules[0].context).index == 0
        total = all_reduce(sums * float(first and tp_rank == 0), world)
        divergence = (total[0] / total[1].clamp(min=1)).clamp(min=0)
        both = total[2] + total[3]
        baseline = torch.stack((divergence, *(both / total[2:].clamp(min=1)).unbind()))
        return [
            replace(batch, pairs=replace(batch.pairs, baseline=baseline))
            if isinstance(batch.pairs, PairBatch)
            else batch
            for batch in batches
        ]

    return add_baseline


def _baseline_sums(pairs: PairBatch, policy: Tensor) -> Tensor:
    """Return sums over pairs: log-ratios of second answers, their number, and desirable and other first answers."""
    assert pairs.reference is not None, "it was added before"
    assert pairs.is_desirable is not None, "the data have a label an answer"
    counts = (pairs.counts.view(-1, 2)[:, 1] > 0).double()
    ratios = (policy - pairs.reference).view(-1, 2)[:, 1] * counts
    good, counted = pairs.is_desirable, pairs.is_counted
    sums = ratios.sum(), counts.sum(), (good * counted).sum(), ((1 - good) * counted).sum()
    return torch.stack(sums)


def contrast_by_cache(forward: ForwardOnly, head: HeadSection, dp: Group) -> AddReference:
    """Return the function that gives pairs of documents their loss among all pairs of a batch.

    A pass of its own has the pooled states of all micro-batches; those of the data-parallel ranks are gathered.

    Args:
        forward: Forward-only pipeline of the rank.
        head: Temperature and normalisation.
        dp: Ranks that read other samples.
    """

    def add(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        found: list[Tensor] = forward.run(document_states, micro_batches)
        if not found:  # not the last stage
            return list(micro_batches)
        whole, first = _gather_rows(torch.cat(found), dp)
        if not len(whole):  # rows of padding alone
            return list(micro_batches)
        contrast, batches = contrast_of(whole, head), []
        for batch, states in zip(micro_batches, found, strict=True):
            here, last = slice(first // 2, (first + len(states)) // 2), first + len(states)
            own = Contrast(
                losses=contrast.losses[here],
                is_right=contrast.is_right[here],
                slopes=contrast.slopes[first:last],
            )
            first = last
            if isinstance(batch.pairs, ScoreBatch) and len(states):
                batch = replace(batch, pairs=replace(batch.pairs, contrast=own))
            batches.append(batch)
        return batches

    return add


def _gather_rows(rows: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return the rows of all ranks [N, D] in group order, and the place of the first of this rank's [n, D]."""
    if group.size == 1:
        return rows, 0
    mine = torch.tensor([len(rows)], device=rows.device)
    counts = all_gather(mine, group).tolist()
    padded = rows.new_zeros((max(counts), rows.shape[1]))
    padded[: len(rows)] = rows
    parts = all_gather(padded, group).view(group.size, *padded.shape)
    whole = torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
    return whole, sum(counts[: group.index])


def document_states(module: StageModule, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
    """Return the activation for the next stage, or the last stage's pooled states of each document, [N, D] float64.

    They are those of whole documents, equal on all context-parallel ranks, without a gradient.
    """
    x, scored = module.evaluated(micro_batch, hidden), micro_batch.pairs
    if module.head is None:
        return x
    if not isinstance(scored, ScoreBatch):  # no document in any row
        return x.new_zeros((0, x.shape[-1]), dtype=torch.float64)
    assert isinstance(module.head, ScoreHead), "the model has a head of documents"
    context = micro_batch.rows.context or module.context
    return sum_over_context(module.head.document_sums(x, scored), context)


def answer_log_probs(module: StageModule, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
    """Return the activation for the next stage, or the last stage's log-probability of each answer, [2 P] float64.

    It is that of whole answers, equal on all context-parallel ranks, without dropout and without a gradient.
    """
    x, pairs = module.evaluated(micro_batch, hidden), micro_batch.pairs
    if module.head is None:
        return x
    if not isinstance(pairs, PairBatch):  # no pair in any row
        return x.new_zeros(0)
    # sum each answer's labels, then over the ranks that share its tokens
    losses = language_head(module.head).token_losses(x, micro_batch.labels)
    context = micro_batch.rows.context or module.context
    return sum_over_context(own_log_probs(losses, micro_batch.mask, pairs), context)


@contextmanager
def _without_adapters(modules: Sequence[StageModule]) -> Iterator[None]:
    for module in modules:
        module.adapters.is_off = True
    try:
        yield
    finally:
        for module in modules:
            module.adapters.is_off = False
