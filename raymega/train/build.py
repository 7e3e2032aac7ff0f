"""Assembly of a rank's training components from the plan, the rank and its process groups.

This is the only assembler. `train/entry.py` opens the process groups before it and restores a
checkpoint after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from raymega.config.schema import Job
from raymega.data.dynamic_loader import DynamicLoader
from raymega.data.images.image_batch import ImageShare
from raymega.data.loader import Loader
from raymega.data.row_rules.span_corruption import empty_row_of
from raymega.data.samples import Samples, open_samples, open_validation
from raymega.model.distillation import DistillationObjective
from raymega.model.heads.objective import ScoreObjective
from raymega.model.moe.router_stats import Routers, find_routers
from raymega.model.pipeline_stage import StageModule
from raymega.model.preference import PairObjective
from raymega.optim.optimizer import Optimizer
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import MicroBatch, make_context, make_contexts
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.data_parallel.state_tensors import FrozenWeights, StateTensor
from raymega.parallel.expert_parallel.overlap import PassInterleaver
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.pipeline.pass_timer import PassTimer
from raymega.plan.batch import BatchPlan, make_batch
from raymega.plan.grid import Coords
from raymega.plan.hardware.tp_overlap import overlaps_messages
from raymega.plan.layers.family_parts import parts_of, score_pooling
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.attention_bytes import attention_weight_bytes
from raymega.plan.packing.step_estimate import step_cost, step_limits
from raymega.plan.run_plan import RunPlan
from raymega.schedule.posting import receive_posts
from raymega.schedule.table import make_forward_only, make_schedule
from raymega.storage.registry import open_store
from raymega.train.build_model import build_model, make_expert_groups, make_p2p
from raymega.train.distillation.teacher import Teacher, build_teacher
from raymega.train.forward_only import (
    AddReference,
    ForwardOnly,
    contrast_by_cache,
    no_reference,
    reference_by_base,
    with_baseline,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Components that only evaluation uses: loaders with their batches, and forward-only executors.

    ``sets`` has the batch and the loader of each validation set by name; a set without a name is alone.
    """

    sets: dict[str, tuple[BatchPlan, Loader[Samples] | DynamicLoader]]
    executor_for: Callable[[int], Executor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingComponents:
    """Everything one rank trains with; built once per attempt.

    ``executor_for`` returns the executor for a number of micro-batches, and caches it; ``passes`` times
    their passes. ``has_loss`` is true on ranks that hold the last stage. ``add_reference`` gives pairs
    their reference log-probabilities, or tokens a live ``teacher``'s, before a pass that needs them.
    """

    plan: RunPlan
    coords: Coords
    has_loss: bool
    groups: Groups
    device: torch.device
    modules: tuple[StageModule, ...]
    loader: Loader[Samples] | DynamicLoader
    executor_for: Callable[[int], Executor]
    passes: PassTimer
    gradients: GradBuffer
    weights: WeightBuffer
    optimizer: Optimizer
    frozen: tuple[FrozenWeights, ...]
    routers: Routers
    comm_log: CommLog
    evaluation: Evaluation | None
    add_reference: AddReference = no_reference
    teacher: Teacher | None = None

    def follow_weights(self, executor: Executor) -> None:
        """Give the weight buffer the order in which ``executor`` uses weights, for ZeRO-3 prefetching."""
        if self.weights.has_parts_only:
            self.weights.follow(
                unit
                for chunk, is_backward in executor.passes
                for unit in self.modules[chunk].uses(is_backward=is_backward)
            )

    def lengths(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Return the length of each micro-batch's activations; it differs only under dynamic context parallelism."""
        return [*map(self.modules[0].carried_length, micro_batches)]


def build_parts(
    plan: RunPlan,
    *,
    rank: int,
    groups: Groups,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
    has_initial_values: bool = True,
) -> TrainingComponents:
    """Assemble a rank's components; each instruction calls ``progress``.

    Parameters get initial values, or zeros without ``has_initial_values``, for a checkpoint to fill.
    """
    job, coords, stages = plan.job, plan.grid.coords(rank), plan.stages_of(rank)
    # communication: tensor, context and expert parallelism, with one log of transfers
    sp = SequenceParallel(
        tp=groups.tp,
        is_sequence_parallel=job.parallel.sequence_parallel,
        is_overlapped=overlaps_messages(job, device.type),
    )
    comm_log = CommLog()
    context = make_context(groups, job.parallel, comm_log)
    experts = make_expert_groups(job, groups, sp=sp, log=comm_log, device=device)
    # model chunks with gradient and weight buffers
    model = build_model(
        plan,
        rank,
        groups=groups,
        context=context,
        experts=experts,
        device=device,
        # with adapters a run's checkpoint lacks what is frozen
        has_initial_values=has_initial_values or job.model.lora.r > 0,
    )
    modules, frozen = model.modules, tuple(model.frozen)
    states = [StateTensor(param=state, group=groups.replicas) for state in model.states]
    _log_attention_weights(job)
    load = partial(_build_loader, plan, rank=rank, groups=groups, log=comm_log, device=device)
    passes = PassTimer.of(device)
    p2p = make_p2p(plan, groups, token_degree=context.degree * sp.degree, device=device)
    parts = TrainingComponents(
        plan=plan,
        coords=coords,
        has_loss=any(stage.is_last for stage in stages),
        groups=groups,
        device=device,
        modules=modules,
        loader=load(open_samples(job, plan.datasets, open_store(job.run_uri)), is_training=True),
        executor_for=_build_executors(
            plan,
            coords,
            modules=modules,
            p2p=p2p,
            interleaver=experts.interleaver,
            progress=progress,
            passes=passes,
        ),
        passes=passes,
        gradients=model.gradients,
        weights=model.weights,
        optimizer=Optimizer(
            model.table.trained,
            model.gradients,
            model.weights,
            job.optimizer,
            job.model,
            groups,
            states=states if job.model.lora.r else [*states, *frozen],
            is_on_host="optimizer" in job.memory.offload,
            log=comm_log,
            plugins=job.plugins,
        ),
        frozen=frozen,
        routers=find_routers(job.model, modules, device),
        comm_log=comm_log,
        evaluation=_build_evaluation(
            plan, coords.pp, modules=modules, p2p=p2p, load=load, progress=progress
        ),
    )
    return _with_objective(parts, p2p, progress)


def _with_objective(
    parts: TrainingComponents, p2p: PointToPoint, progress: Callable[[], None]
) -> TrainingComponents:
    """Return the components with the loss of pairs or scores, and with the pass that computes a reference, if the job has them."""
    section, model = parts.plan.job.preference, parts.plan.job.model
    if parts.plan.job.distillation.is_on:
        return _with_teacher(parts, progress)
    for module in parts.modules:
        if model.head.is_on:
            module.objective = ScoreObjective(model, section, parts.device)
        elif section.is_on:
            module.objective = PairObjective(section, parts.device)
    if model.head.kind == "embedding":
        forward = make_forward(parts, p2p, progress)
        add = contrast_by_cache(forward, model.head, parts.groups.dp)
        return replace(parts, add_reference=add)
    is_live, is_kto = section.reference == "base", section.loss_type == "kto"
    if not section.needs_reference or not (is_live or is_kto):
        return parts
    forward = make_forward(parts, p2p, progress)
    add = reference_by_base(forward) if is_live else no_reference
    if is_kto:
        add = with_baseline(add, forward, parts.groups.world, parts.coords.tp, parts.device)
    return replace(parts, add_reference=add)


def _with_teacher(parts: TrainingComponents, progress: Callable[[], None]) -> TrainingComponents:
    """Return the components with the loss of a distillation, and with a live teacher if the job has one."""
    job, teacher = parts.plan.job, None
    if job.distillation.is_live:
        teacher = build_teacher(
            parts.plan,
            parts.coords,
            groups=parts.groups,
            context=parts.modules[0].context,
            sp=parts.modules[0].tp_stream,
            log=parts.comm_log,
            device=parts.device,
            progress=progress,
        )
    for module in parts.modules:
        module.objective = DistillationObjective(
            job.distillation,
            job.model.vocab_size,
            parts.device,
            teacher.columns if teacher else None,
        )
    if teacher is None:
        return parts
    return replace(parts, teacher=teacher, add_reference=teacher.add_to)


def make_forward(
    parts: TrainingComponents, p2p: PointToPoint, progress: Callable[[], None]
) -> ForwardOnly:
    """Return a forward-only pipeline with the weights of a rank that trains; they may be sharded."""

    def before_pass(executor: Executor[MicroBatch]) -> None:
        parts.weights.start_gather()
        parts.follow_weights(executor)

    return ForwardOnly(
        parts.plan, parts.coords.pp, modules=parts.modules, p2p=p2p, before_pass=before_pass, progress=progress
    )  # fmt: skip


def _log_attention_weights(job: Job) -> None:
    if job.model.attention_dropout:
        num_bytes = attention_weight_bytes(activation_shape(job))
        logger.info(
            "attention dropout: no fused kernel, so each layer keeps its attention weights, "
            "%.1f MiB a micro-batch on each rank",
            num_bytes / 2**20,
        )


def _build_loader(  # noqa: PLR0913  # build is the one place that calls it
    plan: RunPlan,
    source: Samples,
    *,
    rank: int,
    groups: Groups,
    log: CommLog,
    device: torch.device,
    is_training: bool,
) -> Loader[Samples] | DynamicLoader:
    job = plan.job
    # Multi-token prediction needs labels further ahead; evaluation measures the next token only.
    depth = job.model.num_nextn_predict_layers if is_training else 0
    if not job.parallel.dynamic_cp:
        return Loader(
            source,
            dp_rank=plan.grid.coords(rank).dp,
            device=device,
            context=make_context(groups, job.parallel, log),
            depth=depth,
            is_guessing=is_training,
            is_encoder=not parts_of(job.model).is_causal,
            empty=empty_row_of(job.model),
            pooling=score_pooling(job.model),
            images=image_share(plan, rank),
            vision=job.model.vision,
            images_of=source.images,
            timeout_s=job.elastic.collective_timeout_s,
        )
    # Dynamic cp: the loader itself assigns packs of documents to cp groups of several sizes.
    parallel = job.parallel
    return DynamicLoader(
        source,
        rank=groups.replicas.index,
        contexts=make_contexts(groups, parallel, log),
        limits=step_limits(plan),
        cost=step_cost(plan),
        device=device,
        is_guessing=is_training,
        timeout_s=job.elastic.collective_timeout_s,
        depth=depth,
    )


def image_share(plan: RunPlan, rank: int) -> ImageShare | None:
    """Return the share of a micro-batch's images that this rank's vision tower reads; None without a tower."""
    vision, coords, grid = plan.job.model.vision, plan.grid.coords(rank), plan.grid
    if not (vision.is_on and any(stage.is_first for stage in plan.stages_of(rank))):
        return None
    is_balanced = plan.job.parallel.balance_images
    # tp ranks that cut the tower read the same images
    tp, tp_rank = (1, 0) if vision.tensor_parallel else (grid.tp, coords.tp)
    return ImageShare(
        vision=vision,
        index=coords.cp * tp + tp_rank,
        size=grid.cp * tp,
        dp=grid.dp if is_balanced else 1,
        dp_rank=coords.dp if is_balanced else 0,
    )


def _build_executors(  # noqa: PLR0913  # what an executor is made of
    plan: RunPlan,
    coords: Coords,
    *,
    modules: Sequence[StageModule],
    p2p: PointToPoint,
    interleaver: PassInterleaver | None,
    progress: Callable[[], None],
    passes: PassTimer,
) -> Callable[[int], Executor]:
    @cache
    def make(num_micro_batches: int) -> Executor:
        sizes = plan.sizes(replace(plan.batch, num_micro_batches=num_micro_batches))
        program = make_schedule(plan.job.schedule.name, sizes)
        return Executor(
            program.lists[coords.pp],
            [module.run for module in modules],
            p2p,
            posts=receive_posts(program, coords.pp, is_paired=interleaver is not None),
            deferrals=[module.grad_queue for module in modules],
            interleaver=interleaver,
            progress=progress,
            passes=passes,
        )

    return make


def _build_evaluation(
    plan: RunPlan,
    pp_rank: int,
    *,
    modules: Sequence[StageModule],
    p2p: PointToPoint,
    load: Callable[..., Loader[Samples] | DynamicLoader],
    progress: Callable[[], None],
) -> Evaluation | None:
    """Return the components of an evaluation, or None when ``run.eval_samples`` is 0."""
    job = plan.job
    if job.run.eval_samples == 0:
        return None
    # One batch holds all samples of a set, so that one forward-only schedule covers them.
    sets = {}
    for name, samples in open_validation(job, plan.datasets).items():
        batch = make_batch(
            global_batch_size=min(job.run.eval_samples, samples.num_samples),
            micro_batch_size=plan.batch.micro_batch_size,
            dp=plan.grid.dp,
        )
        sets[name] = batch, load(samples, is_training=False)

    @cache
    def make(num_micro_batches: int) -> Executor:
        program = make_forward_only(plan.placement, num_micro_batches)
        return Executor(
            program.lists[pp_rank],
            [module.evaluate for module in modules],
            p2p,
            posts=receive_posts(program, pp_rank),
            progress=progress,
        )

    return Evaluation(sets=sets, executor_for=make)
