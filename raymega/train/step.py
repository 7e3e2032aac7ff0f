"""Optimizer step: forward, backward, reduce, clip, update; the only place that divides a loss.

The objective is the sum of token losses divided by the global count of unmasked tokens. Every rank
learns the same totals from one small all-reduce, so all ranks take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, isinf, sqrt

import torch

from raymega.errors import DataError
from raymega.events import BadStep
from raymega.messages import Requests
from raymega.model.heads.objective import reported_statistics
from raymega.model.moe.load_balancing import Load
from raymega.model.preference import STATISTICS
from raymega.optim.clip import clip_factor, local_norm_sq
from raymega.optim.loss_scale import next_loss_scale
from raymega.optim.lr_schedule import learning_rate
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.context_parallel.context import MicroBatch
from raymega.parallel.core.host_copies import to_device
from raymega.plan.run_plan import RunPlan
from raymega.schedule.timeline import Event
from raymega.train.bad_steps import BadNumbers, BadStepAction, decide, detect_bad_step
from raymega.train.build import TrainingComponents
from raymega.train.forward_backward import (
    forward_backward,
    no_labels,
    num_segment_pairs,
    read_back,
    sum_over_world,
)
from raymega.train.nan_locator import locate_non_finite, refuse_step
from raymega.train.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of a step; equal on all ranks except for ``events``.

    Attributes:
        state: State of the run after the step.
        loss: Mean loss in nats per token.
        mtp_loss: Mean loss of multi-token prediction over its depths, per token; None without it.
        pair_loss: Mean loss of an encoder's pairs of segments; None without them.
        grad_norm: Global gradient norm before clipping; non-finite after a float16 overflow.
        lr: Learning rate of the update.
        samples: Number of sequences in the global batch.
        tokens: Number of unmasked tokens in the global batch.
        divisor: Number that divided the sum of losses: unmasked tokens, or pairs of answers.
        is_skipped: Whether the step updated nothing.
        stop: Whether the driver asked any rank to stop.
        save: Whether the driver asked for a save.
        regroup: Whether the driver asked to leave the loop without a save.
        extra_reductions: Sums over all ranks of the numbers given to :func:`train_step`.
        pair_means: Means of the statistics of pairs, or of a head's scores, by name; empty where the loss has none.
        loads: Routing of all tokens, by layer with experts.
        events: Recorded events of this rank; empty unless the step was recorded.
        bad_step: Fault of the step's first pass, if it had one.
        image_tokens: Number of tokens in the global batch that stand for patches of images.
        images: Number of these images.
    """

    state: TrainState
    loss: float
    mtp_loss: float | None
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    divisor: int
    is_skipped: bool
    stop: bool
    save: bool
    regroup: bool
    extra_reductions: tuple[float, ...]
    loads: Mapping[int, Load]
    events: tuple[Event, ...]
    pair_means: Mapping[str, float] = field(default_factory=dict)
    bad_step: BadStep | None = None
    pair_loss: float | None = None
    image_tokens: int = 0
    images: float = 0.0


FIXED = 9
"""Sums of a step in front of the statistics of pairs."""


def _do_nothing() -> None:
    pass


def train_step(
    parts: TrainingComponents,
    state: TrainState,
    requests: Requests,
    *,
    is_recording: bool,
    extra_reductions: Sequence[float] = (),
    before_update: Callable[[], None] = _do_nothing,
) -> StepOutcome:
    """Run forward, backward, gradient reduction, clipping and update.

    A float16 overflow shows in the global norm, hence on every rank: the step then updates nothing and
    lowers the loss scale. A bad step is run once more, then treated as ``elastic.on_nan`` or
    ``elastic.on_spike`` says.

    Args:
        parts: Components of this rank.
        state: State of the run before the step.
        requests: Requests of the driver to this rank.
        is_recording: Whether to record the events of the step's time line.
        extra_reductions: Numbers of this rank to be summed over all ranks in the step's all-reduce.
        before_update: Callback before masters and moments change.

    Raises:
        NumericsError: The step is bad and the job ends or rolls back; parameters are unchanged.
        DataError: All labels of the batch are masked; parameters are unchanged.
    """
    # forward and backward; gradients and totals summed over all ranks
    job, batch = parts.plan.job, parts.plan.batch_at(state.samples)
    micro_batches = parts.add_reference(parts.loader.micro_batches(batch, state.samples))
    scale = loss_gradient(parts.plan, state)
    # rank 0 alone asks for a save or to regroup, so one number holds both
    asked = (requests.stop, requests.save + 2 * requests.regroup, *extra_reductions)
    do_pass = partial(_do_pass, parts, state, micro_batches, asked, scale)
    seen, bad_step = do_pass(is_recording=is_recording), None
    # check the totals before any weight changes; a bad step gets a second pass
    numbers = _bad_numbers(parts, state, seen)
    if numbers:
        seen, bad_step = _settle(parts, state, numbers, seen, do_pass, micro_batches)
    totals = seen.totals
    # update: clip, undo the loss scale and divide by tokens in one factor
    lr = learning_rate(
        job.optimizer,
        total_steps=job.run.steps,
        step=state.updates,
        plugins=job.plugins,
    )
    is_left_out = bad_step is not None and bad_step.action == BadStepAction.SKIP
    events = list(seen.events)
    if not (seen.is_overflow or is_left_out):
        factor = clip_factor(seen.grad_norm, job.optimizer.max_grad_norm)
        before_update()
        factor = factor / totals.divisor / scale
        with parts.comm_log.rest() as in_update:
            parts.optimizer.step(lr=lr, step=state.updates + 1, gradient_factor=factor)
        events += in_update
        parts.routers.update(totals.routing)
        parts.weights.start_gather()  # overlaps with reports, saves and loading of the next batch
    # totals, and the state after the step
    return StepOutcome(
        state=_state_after(parts, state, seen, is_left_out=is_left_out),
        loss=seen.loss, mtp_loss=seen.mtp_loss, grad_norm=seen.grad_norm, lr=lr,
        samples=batch.global_batch_size, divisor=round(totals.divisor), tokens=round(totals.tokens),
        is_skipped=seen.is_overflow or is_left_out, stop=totals.stop, save=totals.save, regroup=totals.regroup,
        extra_reductions=totals.extra_reductions, loads=totals.loads, events=tuple(events), bad_step=bad_step,
        pair_loss=seen.pair_loss, image_tokens=round(totals.image_tokens), images=totals.images,
        pair_means=_pair_means(totals, reported_statistics(job)),
    )  # fmt: skip


def _pair_means(totals: _Totals, reported: Mapping[str, int]) -> dict[str, float]:
    return {name: totals.pair_statistics[at] / totals.divisor for name, at in reported.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Result of a forward and backward over a step's micro-batches, summed over all ranks."""

    loss: float
    mtp_loss: float | None
    pair_loss: float | None
    grad_norm: float
    is_overflow: bool
    totals: _Totals
    events: tuple[Event, ...]


def _do_pass(
    parts: TrainingComponents,
    state: TrainState,
    micro_batches: Sequence[MicroBatch],
    asked: Sequence[float],
    scale: float,
    *,
    is_recording: bool,
) -> _Pass:
    """Run one pass and sum its totals; ``asked`` is summed in the same all-reduce."""
    output = forward_backward(parts, micro_batches, loss_gradient=scale, is_recording=is_recording)
    totals = _totals_of(parts, output.loss_sum, micro_batches, asked)
    if not totals.divisor:
        raise DataError(no_labels(f"step {state.step + 1}"))
    # Gradients are those of the scaled sum of losses, so the norm is divided by both.
    divisor = totals.divisor
    loss, grad_norm = totals.loss_sum / divisor, sqrt(totals.norm_sq) / divisor / scale
    model = parts.plan.job.model
    depth, has_pairs = model.num_nextn_predict_layers, model.encoder.has_pairs
    return _Pass(
        loss=loss,
        mtp_loss=totals.mtp_loss_sum / divisor / depth if depth else None,
        pair_loss=totals.pair_loss_sum / max(1.0, totals.segment_pairs) if has_pairs else None,
        grad_norm=grad_norm,
        is_overflow=state.loss_scale is not None and isfinite(loss) and not isfinite(grad_norm),
        totals=totals,
        events=output.events,
    )


def _bad_numbers(parts: TrainingComponents, state: TrainState, seen: _Pass) -> BadNumbers | None:
    # A float16 overflow is routine: the loss scale handles it.
    if seen.is_overflow:
        return None
    section = parts.plan.job.elastic
    return detect_bad_step(section, state, loss=seen.loss, grad_norm=seen.grad_norm)


def _settle(  # all of a step
    parts: TrainingComponents,
    state: TrainState,
    numbers: BadNumbers,
    seen: _Pass,
    do_pass: Callable[..., _Pass],
    micro_batches: Sequence[MicroBatch],
) -> tuple[_Pass, BadStep]:
    """Run a bad step's second pass, and act by the job's policy if that pass is bad too.

    No weight has changed, and a pass depends on weights and samples alone. So the second pass has what the
    first would have had without a hardware fault: its bits, except on a GPU without run.deterministic.
    """
    settled = partial(BadStep, step=state.step + 1)
    # second pass
    if numbers.policy != "stop":
        seen = replace(do_pass(is_recording=False), events=seen.events)
        left = _bad_numbers(parts, state, seen)
        if left is None:
            action = BadStepAction.SECOND_PASS
            return seen, settled(kind=numbers.kind, fact=numbers.fact, action=action.value)
        numbers = left
    # locate: one more pass, under hooks
    where = ""
    if numbers.kind == "nan":
        scale = loss_gradient(parts.plan, state)
        where = locate_non_finite(parts, micro_batches, loss_gradient=scale)
    # act: the errors end the attempt on every rank
    action = decide(parts.plan.job.elastic, state, numbers)
    fact = f"step {state.step + 1}: {numbers.fact}" + (f"; {where}" if where else "")
    if action is BadStepAction.STOP:
        raise refuse_step(fact, numbers=numbers)
    if action is BadStepAction.ROLL_BACK:
        end = state.samples + parts.plan.batch_at(state.samples).global_batch_size
        raise refuse_step(fact, numbers=numbers, roll_back_to=end)
    return seen, settled(kind=numbers.kind, fact=numbers.fact, where=where, action=action.value)


def _state_after(
    parts: TrainingComponents, state: TrainState, seen: _Pass, *, is_left_out: bool
) -> TrainState:
    job = parts.plan.job
    after = state.advance(
        samples=parts.plan.batch_at(state.samples).global_batch_size,
        tokens=round(seen.totals.tokens),
        is_skipped=seen.is_overflow or is_left_out,
        loss_scale=state.loss_scale
        if is_left_out
        else next_loss_scale(state.loss_scale, job.precision, is_overflow=seen.is_overflow),
    )
    # Bad numbers are not remembered: they would move the median that finds spikes.
    if is_left_out:
        return replace(after, bad_steps=state.bad_steps + 1)
    if seen.is_overflow:
        return after
    window = job.elastic.spike_window
    return after.remember(loss=seen.loss, grad_norm=seen.grad_norm, window=window)


def loss_gradient(plan: RunPlan, state: TrainState) -> float:
    """Return the gradient of the loss that backward starts from: 1, or float16's loss scale."""
    if state.loss_scale is None:
        return 1.0
    tokens = plan.batch.micro_batch_size * plan.job.data.seq_len
    return state.loss_scale.loss_gradient(micro_batch_tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Totals:
    loss_sum: float
    mtp_loss_sum: float
    divisor: float
    """Number by which the loss is divided: labels that count, or pairs."""
    tokens: float
    pair_statistics: tuple[float, ...]
    norm_sq: float
    pair_loss_sum: float
    segment_pairs: float
    image_tokens: float
    images: float
    stop: bool
    save: bool
    regroup: bool
    extra_reductions: tuple[float, ...]
    loads: Mapping[int, Load]
    routing: torch.Tensor
    """Sums behind ``loads``, on the device."""


def _totals_of(
    parts: TrainingComponents,
    loss_sum: torch.Tensor,
    micro_batches: Sequence[MicroBatch],
    others: Sequence[float],
) -> _Totals:
    """Sum each rank's numbers over the world in one all-reduce, and read them in one copy.

    Tensor-parallel rank 0 counts the loss. Of each gradient element exactly one rank counts the square.
    """
    mine = _own_numbers(parts, loss_sum, micro_batches, others)
    # one all-reduce: the step's sums, then the routing of each layer
    routing = parts.routers.take_sums()
    everything = all_reduce(torch.cat((mine, routing.flatten())), parts.groups.world)
    host = read_back(everything, "the step's totals")
    total = host[: len(mine)].tolist()
    others_at = FIXED + len(STATISTICS)
    # Squares of float32 overflow: every rank sees it in the sum, and all take wide ones.
    if isinf(total[3]):
        wide = local_norm_sq(parts.gradients.shares(), parts.device, is_wide=True)
        (total[3],) = sum_over_world(parts, [float(wide)])
    return _Totals(
        loss_sum=total[0],
        mtp_loss_sum=total[1],
        divisor=total[2],
        norm_sq=total[3],
        tokens=total[4],
        pair_loss_sum=total[5],
        segment_pairs=total[6],
        image_tokens=total[7],
        images=total[8],
        pair_statistics=tuple(total[FIXED:others_at]),
        stop=total[others_at] > 0,
        save=round(total[others_at + 1]) % 2 > 0,
        regroup=total[others_at + 1] >= 2,
        extra_reductions=tuple(total[others_at + 2 :]),
        loads=parts.routers.loads(host[len(mine) :].view_as(routing)),
        routing=everything[len(mine) :].view_as(routing),
    )


def _own_numbers(
    parts: TrainingComponents,
    loss_sum: torch.Tensor,
    micro_batches: Sequence[MicroBatch],
    others: Sequence[float],
) -> torch.Tensor:
    """Return this rank's numbers on the device, float64: sums of the step, then ``others``.

    The order is that of :class:`_Totals`. No number of the device comes to the host.
    """
    counts_loss = parts.has_loss and parts.coords.tp == 0
    divisor = sum(batch.divisor for batch in micro_batches) * counts_loss
    tokens = sum(batch.num_counted for batch in micro_batches) * counts_loss
    # float64, so that counts of tokens are exact
    segment_pairs = num_segment_pairs(micro_batches) * counts_loss
    of_images = ([batch.image_counts[at] for batch in micro_batches] for at in range(2))
    images = [sum(each) * counts_loss for each in of_images]
    counts = [divisor, 0.0, tokens, 0.0, segment_pairs, *images]
    sums = [0.0, 0.0, *counts, *[0.0] * len(STATISTICS)]
    mine = to_device([*sums, *others], parts.device)
    # sums that the passes left on the device
    mtp_loss_sum = sum(module.take_mtp_loss_sum() for module in parts.modules)
    heads = [module.head.segment_pairs for module in parts.modules if module.head is not None]
    pair_loss_sum = sum(head.take_loss_sum() for head in heads if head is not None)
    statistics = [module.objective.take_sums() for module in parts.modules if module.objective]
    if counts_loss:
        for each in statistics:
            mine[FIXED : FIXED + len(STATISTICS)] += each
        # fill_, as an assignment of a Python number copies it from the host; a number is 0 where nothing was summed
        mine[0].fill_(loss_sum)
        for place, summed in ((1, mtp_loss_sum), (5, pair_loss_sum)):
            if isinstance(summed, torch.Tensor):
                mine[place].fill_(summed)
    mine[3].fill_(local_norm_sq(parts.gradients.shares(), parts.device))
    return mine
