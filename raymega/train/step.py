"""One optimizer step, as the paper would write it; the only place that divides a loss.

The objective is the sum of token losses over the global count of unmasked tokens. Every rank
learns the same totals from one small all-reduce, so every rank takes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from raymega.data.loader import MicroBatch
from raymega.errors import DataError, Fault
from raymega.messages import Requests
from raymega.model.balance import Load
from raymega.optim.clip import clip_factor, local_norm_sq
from raymega.optim.loss_scale import next_loss_scale
from raymega.optim.lr_schedule import learning_rate
from raymega.parallel.comm import all_reduce
from raymega.plan.run_plan import RunPlan
from raymega.schedule.timeline import Event
from raymega.train.build import Parts
from raymega.train.numerics import refuse_non_finite_step
from raymega.train.passes import forward_backward
from raymega.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step did; equal on all ranks but for ``events``.

    ``state`` is where the run stands after it. ``loss`` is in nats per token, ``mtp_loss`` that of
    tokens further ahead, mean of depths, by the same count; None without them. ``grad_norm`` is the
    global norm before clipping, not finite when the step ``is_skipped`` for an overflow. ``stop`` and
    ``save`` are true when the driver asked any rank for it. ``summed`` is what the ranks gave to be
    summed, ``loads`` by layer what the routing of all tokens was.
    """

    state: TrainState
    loss: float
    mtp_loss: float | None
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    is_skipped: bool
    stop: bool
    save: bool
    summed: tuple[float, ...]
    loads: Mapping[int, Load]
    events: tuple[Event, ...]


def _do_nothing() -> None:
    pass


def train_step(
    parts: Parts,
    state: TrainState,
    wishes: Requests,
    *,
    is_recording: bool,
    summed: Sequence[float] = (),
    before_update: Callable[[], None] = _do_nothing,
) -> StepOutcome:
    """Forward, backward, reduce, clip, update.

    ``summed`` are numbers of this rank whose sums over all ranks it asks for beside; they leave with
    the totals, before the update.

    A float16 gradient that overflows shows in the norm, hence on every rank: the step updates
    nothing, and the loss scale sinks. ``before_update`` is called when masters and moments are about
    to change.

    Raises:
        NumericsError: The loss or the gradient norm is not finite; parameters are untouched.
        DataError: No token of the batch has a label that counts; the same.
    """
    job, batch = parts.plan.job, parts.plan.batch_at(state.samples)
    micro_batches = parts.loader.micro_batches(batch, state.samples)
    scale = loss_gradient(parts.plan, state)
    output = forward_backward(parts, micro_batches, loss_gradient=scale, is_recording=is_recording)

    others = (wishes.stop, wishes.save, *summed)
    totals = _totals_of(parts, output.loss_sum, micro_batches, others)
    if not totals.tokens:
        raise DataError(no_labels(f"step {state.step + 1}"))
    loss, grad_norm = totals.loss_sum / totals.tokens, sqrt(totals.norm_sq) / totals.tokens / scale
    depth = job.model.mtp_depth
    mtp_loss = totals.mtp_loss_sum / totals.tokens / depth if depth else None
    is_overflow = state.loss_scale is not None and isfinite(loss) and not isfinite(grad_norm)
    lr = learning_rate(job.optimizer, total_steps=job.run.steps, step=state.updates)
    if not is_overflow:
        refuse_non_finite_step(
            parts, micro_batches, step=state.step + 1, loss=loss, grad_norm=grad_norm,
            loss_gradient=scale,
        )  # fmt: skip
        factor = clip_factor(grad_norm, job.optimizer.clip_norm)
        before_update()
        factor = factor / totals.tokens / scale
        parts.optimizer.step(lr=lr, step=state.updates + 1, gradient_factor=factor)
        parts.routers.update(totals.loads)
        parts.weights.start_gather()  # goes on beside reports, saves and the next step's data
    after = state.advance(
        samples=batch.global_batch_size,
        tokens=round(totals.tokens),
        is_skipped=is_overflow,
        loss_scale=next_loss_scale(state.loss_scale, job.precision, is_overflow=is_overflow),
    )
    return StepOutcome(
        state=after, loss=loss, mtp_loss=mtp_loss, grad_norm=grad_norm, lr=lr, samples=batch.global_batch_size,
        tokens=round(totals.tokens), is_skipped=is_overflow, stop=totals.stop, save=totals.save,
        summed=totals.summed, loads=totals.loads, events=output.events,
    )  # fmt: skip


def no_labels(what: str) -> Fault:
    """The fault of ``what``, whose loss is a mean over no tokens."""
    return Fault(
        fact=f"{what} reads no token with a label that counts",
        rule="packed documents of one token, and what is left of longer ones, predict nothing",
        remedy="set a larger data.global_batch_size, run.eval_samples or data.seq_len",
    )


def sum_over_world(parts: Parts, numbers: Sequence[float]) -> tuple[float, ...]:
    """The sum of each number over all ranks."""
    mine = torch.tensor(numbers, dtype=torch.float64, device=parts.device)
    return tuple(all_reduce(mine, parts.groups.world).tolist())


def loss_gradient(plan: RunPlan, state: TrainState) -> float:
    """What backward starts from: 1, but for float16's scale."""
    if state.loss_scale is None:
        return 1.0
    tokens = plan.batch.micro_batch_size * plan.job.data.seq_len
    return state.loss_scale.loss_gradient(micro_batch_tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Totals:
    loss_sum: float
    mtp_loss_sum: float
    tokens: float
    norm_sq: float
    stop: bool
    save: bool
    summed: tuple[float, ...]
    loads: Mapping[int, Load]


def _totals_of(
    parts: Parts,
    loss_sum: torch.Tensor,
    micro_batches: list[MicroBatch],
    others: Sequence[float],
) -> _Totals:
    """Sum what each rank knows: each loss once (tp rank 0), each gradient by who counts it, each
    token's routing by who routed it.
    """
    here = parts.coords
    counts_loss = parts.has_loss and here.tp == 0
    tokens = sum(float(batch.mask.sum()) for batch in micro_batches) if counts_loss else 0.0
    norm_sq = local_norm_sq(parts.gradients.shares(), parts.device)
    mine = [
        float(loss_sum) if counts_loss else 0.0,
        sum(module.take_mtp_loss_sum() for module in parts.modules) if counts_loss else 0.0,
        tokens,
        float(norm_sq),
        *others,
    ]
    routing = parts.routers.take_sums()
    scalars = torch.tensor(mine, dtype=torch.float64, device=parts.device)
    everything = all_reduce(torch.cat((scalars, routing.flatten())), parts.groups.world)
    total = everything[: len(mine)].tolist()
    return _Totals(
        loss_sum=total[0],
        mtp_loss_sum=total[1],
        tokens=total[2],
        norm_sq=total[3],
        stop=total[4] > 0,
        save=total[5] > 0,
        summed=tuple(total[6:]),
        loads=parts.routers.loads(everything[len(mine) :].view_as(routing)),
    )
