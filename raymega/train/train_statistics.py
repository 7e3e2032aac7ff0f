"""Training statistics: norms by group of tensors, activations by block, expert routing.

All are over the whole model and the whole batch, so they are equal on any layout, up to rounding. Each
reads every value once and makes one small all-reduce, in steps in which it is due.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from raymega.events import ExpertLoads
from raymega.model.layers.transformer_block import TransformerBlock
from raymega.model.moe.load_balancing import Load
from raymega.optim.clip import clip_factor, local_norm_sq_by_group, tensor_groups
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.world import raise_if_aborted
from raymega.plan.tensor_table import model_tensors
from raymega.tracking.expert_load import load_metrics
from raymega.train.bad_steps import BadStepAction
from raymega.train.build import TrainingComponents
from raymega.train.module_hooks import TensorObservation, hook_modules
from raymega.train.state import TrainState
from raymega.train.step import StepOutcome, loss_gradient

Metrics = dict[str, float]


@contextmanager
def activations_of(parts: TrainingComponents, *, is_due: bool) -> Iterator[Activations | None]:
    """Yield the accumulator of activations that the body's step fills; None when not due."""
    if not is_due:
        yield None
        return
    activations = Activations(parts)
    with hook_modules(parts.modules, activations.see, only=TransformerBlock):
        yield activations


class Activations:
    """Moments of each block's output, and of the loss's gradient by that output, over one step."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts = parts
        shape = (parts.plan.job.model.num_layers, 2)
        at = {"dtype": torch.float64, "device": parts.device}
        self._sums = torch.zeros(*shape, 3, **at)  # type: ignore[call-overload]  # [layer, kind, (count, sum, sum of squares)]
        self._peaks = torch.zeros(*shape, **at)  # type: ignore[call-overload]  # largest magnitudes

    def see(self, seen: TensorObservation) -> None:
        """Add a tensor [S/sp, B, D], without the slots of a partial batch that hold no sample."""
        where, _, layer = seen.name.rpartition(".")
        if where != "layers":
            return  # a block of multi-token prediction
        is_sample = seen.samples >= 0
        x = seen.tensor if bool(is_sample.all()) else seen.tensor[:, is_sample]
        if x.numel() == 0:
            return
        place = (int(layer), int(seen.kind == "gradient"))
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        self._sums[place] += torch.stack(
            (torch.full_like(norm, x.numel()), x.sum(dtype=torch.float64), norm.square())
        )
        self._peaks[place] = torch.maximum(self._peaks[place], x.abs().max())

    def metrics(self, before: TrainState, outcome: StepOutcome) -> Metrics:
        """Return mean, standard deviation and largest magnitude by layer; a collective call.

        A step that used its second pass has none: the first pass's bad numbers were added too.
        """
        if outcome.bad_step is not None and outcome.bad_step.action == BadStepAction.SECOND_PASS:
            return {}
        parallel, here = self._parts.plan.job.parallel, self._parts.coords
        if here.tp > 0 and not parallel.sequence_parallel:
            self._sums.zero_()  # tp ranks hold the same stream: count it once
        sums = all_reduce(self._sums, self._parts.groups.world)
        peaks = all_reduce(self._peaks, self._parts.groups.world, op="max")
        # Backward saw the gradient of the scaled sum of losses; report that of the mean loss.
        unit = torch.ones_like(peaks)
        unit[:, 1] = 1 / (loss_gradient(self._parts.plan, before) * outcome.divisor)
        # Rounding can make a variance of zero negative, hence the clamp.
        count, total, squares = sums.unbind(-1)
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        columns = {"mean": mean * unit, "std": std * unit, "max_abs": peaks * unit}
        rows = {column: table.tolist() for column, table in columns.items()}
        raise_if_aborted("the statistics of all layers")
        return {
            f"train/{kind}_{column}/{layer}": value
            for column, table in rows.items()
            for layer, row in enumerate(table)
            for kind, value in zip(("output", "output_grad"), row, strict=True)
        }


def norm_metrics(parts: TrainingComponents, outcome: StepOutcome) -> Metrics:
    """Return norms of weights after the step and gradients before clipping, by tensor group."""
    job = parts.plan.job
    groups = tensor_groups(model_tensors(job.model))
    mine = torch.stack(
        [
            local_norm_sq_by_group(shares, groups, parts.device)
            for shares in (parts.optimizer.shares(), parts.gradients.shares())
        ]
    )
    weights, gradients = all_reduce(mine, parts.groups.world).sqrt().tolist()
    raise_if_aborted("the norms of all tensors")
    # The update scaled the gradients in place: undo the clipping.
    factor = clip_factor(outcome.grad_norm, job.optimizer.max_grad_norm)
    metrics = {
        f"train/group_weight_norm/{group}": norm
        for group, norm in zip(groups, weights, strict=True)
    }
    return metrics | {
        f"train/group_grad_norm/{group}": norm / factor
        for group, norm in zip(groups, gradients, strict=True)
    }


def expert_metrics(loads: Mapping[int, Load]) -> Metrics:
    """Return routing metrics of every layer with experts that saw a token."""
    metrics: Metrics = {}
    for layer, load in loads.items():
        counts = load.counts.tolist()
        if not sum(counts):
            continue
        metrics |= load_metrics(layer, counts)
        metrics |= {
            f"moe/drop_rate/{layer}": 1 - load.kept / sum(counts),
            f"moe/router_entropy/{layer}": load.entropy / load.tokens,
            f"moe/router_loss/{layer}": (load.balance + load.z) / load.tokens,
        }
    return metrics


def expert_loads(loads: Mapping[int, Load], *, step: int) -> ExpertLoads:
    """Return the event with the number of tokens by layer and expert."""
    tokens = {layer: tuple(load.counts.tolist()) for layer, load in loads.items()}
    return ExpertLoads(step=step, tokens=tokens)
