"""Statistics for whoever looks for trouble: norms by group of tensors, activations by block, routing.

All are over the whole model and the whole batch, so they are equal on any layout, to rounding. Each
costs a look at every value and one small all-reduce in the steps in which it is due.
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
    """While it lasts, a step's activations are added up; None when they are not due."""
    if not is_due:
        yield None
        return
    activations = Activations(parts)
    with hook_modules(parts.modules, activations.see, only=TransformerBlock):
        yield activations


class Activations:
    """Moments of each block's output and of the loss's gradient by it, over one step."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts = parts
        shape = (parts.plan.job.model.num_layers, 2)
        at = {"dtype": torch.float64, "device": parts.device}
        self._sums = torch.zeros(*shape, 3, **at)  # type: ignore[call-overload]  # [layer, kind, (count, sum, sum of squares)]
        self._peaks = torch.zeros(*shape, **at)  # type: ignore[call-overload]  # largest magnitudes

    def see(self, seen: TensorObservation) -> None:
        """Add x: [S/sp, B, D] but for slots of the batch's tail that hold no sample."""
        where, _, layer = seen.name.rpartition(".")
        if where != "layers":
            return  # it predicts further ahead
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
        """Mean, standard deviation and largest magnitude by layer; all ranks call it together.

        None of a step whose second pass was used: the bad numbers of the first were seen as well.
        """
        if outcome.bad_step is not None and outcome.bad_step.action == BadStepAction.SECOND_PASS:
            return {}
        parallel, here = self._parts.plan.job.parallel, self._parts.coords
        if here.tp > 0 and not parallel.sequence_parallel:
            self._sums.zero_()  # tp ranks hold the same stream
        sums = all_reduce(self._sums, self._parts.groups.world)
        peaks = all_reduce(self._peaks, self._parts.groups.world, op="max")
        # What backward saw is the gradient of the scaled sum of losses; this is that of the loss.
        unit = torch.ones_like(peaks)
        unit[:, 1] = 1 / (loss_gradient(self._parts.plan, before) * outcome.tokens)
        count, total, squares = sums.unbind(-1)
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        columns = {"mean": mean * unit, "std": std * unit, "max_abs": peaks * unit}
        return {
            f"train/{kind}_{column}/{layer}": value
            for column, table in columns.items()
            for layer, row in enumerate(table.tolist())
            for kind, value in zip(("output", "output_grad"), row, strict=True)
        }


def norm_metrics(parts: TrainingComponents, outcome: StepOutcome) -> Metrics:
    """Norms of weights after the step and of gradients before clipping, by group of tensors."""
    job = parts.plan.job
    groups = tensor_groups(model_tensors(job.model))
    mine = torch.stack(
        [
            local_norm_sq_by_group(shares, groups, parts.device)
            for shares in (parts.optimizer.shares(), parts.gradients.shares())
        ]
    )
    weights, gradients = all_reduce(mine, parts.groups.world).sqrt().tolist()
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
    """Metrics of every layer with experts; of none that saw no token."""
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
    """Tokens by layer and expert."""
    tokens = {layer: tuple(load.counts.tolist()) for layer, load in loads.items()}
    return ExpertLoads(step=step, tokens=tokens)
