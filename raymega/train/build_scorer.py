"""Assembly of what a rank needs to score tokens: weights and a forward-only pipeline, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from raymega.checkpoint.load.adapted_base import BASE_REMEDY, open_base
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.load.starting_values import finish_upcycling
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import Context, MicroBatch, make_context
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.data_parallel.state_tensors import StateTensor, TensorBlock
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.token_scores import TokenScores
from raymega.plan.hardware.tp_overlap import overlaps_messages
from raymega.plan.run_plan import RunPlan
from raymega.train.build import TrainingComponents, make_forward
from raymega.train.build_model import build_weights, make_expert_groups, make_p2p
from raymega.train.forward_only import ForwardOnly


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Weights of one rank, and its part of a forward-only pipeline.

    Attributes:
        plan: Plan of the grid.
        modules: Model chunks, in the order of their stages.
        context: Ranks that share a row's tokens.
        has_scores: True on ranks that hold the last stage.
        forward: Forward-only pipeline of this rank.
        run: Function that returns the scores of each micro-batch, in order; none without the last stage.
        weights: Buffer of the weights.
    """

    plan: RunPlan
    modules: tuple[StageModule, ...]
    context: Context
    has_scores: bool
    forward: ForwardOnly
    run: Callable[[Sequence[MicroBatch]], list[TokenScores]]
    weights: WeightBuffer


def build_scorer(
    plan: RunPlan,
    *,
    rank: int,
    groups: Groups,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> Scorer:
    """Assemble a rank's scorer with weights of zeros; each instruction calls ``progress``."""
    job = plan.job
    # the model, as a training rank has it
    sp = SequenceParallel(
        tp=groups.tp,
        is_sequence_parallel=job.parallel.sequence_parallel,
        is_overlapped=overlaps_messages(job, device.type),
    )
    log = CommLog()
    context = make_context(groups, job.parallel, log)
    model = build_weights(
        plan,
        rank,
        groups=groups,
        context=context,
        experts=make_expert_groups(job, groups, sp=sp, log=log, device=device),
        device=device,
        has_initial_values=False,
    )
    p2p = make_p2p(plan, groups, token_degree=context.degree * sp.degree, device=device)
    forward = ForwardOnly(
        plan, plan.grid.coords(rank).pp, modules=model.modules, p2p=p2p, progress=progress
    )
    return _scorer(plan, rank, forward, model.weights)


def scorer_of(parts: TrainingComponents, progress: Callable[[], None]) -> Scorer:
    """Return a scorer with the weights of a rank that trains; they may be sharded."""
    rank = parts.plan.grid.rank(parts.coords)
    return _scorer(parts.plan, rank, forward_of(parts, progress), parts.weights)


def forward_of(parts: TrainingComponents, progress: Callable[[], None]) -> ForwardOnly:
    """Return a forward-only pipeline with the weights of a rank that trains, and transfers of its own."""
    module, plan = parts.modules[0], parts.plan
    degree = module.context.degree * module.tp_stream.degree
    p2p = make_p2p(plan, parts.groups, token_degree=degree, device=parts.device)
    return make_forward(parts, p2p, progress)


def _scorer(plan: RunPlan, rank: int, forward: ForwardOnly, weights: WeightBuffer) -> Scorer:
    return Scorer(
        plan=plan,
        modules=forward.modules,
        context=forward.modules[0].context,
        has_scores=any(stage.is_last for stage in plan.stages_of(rank)),
        forward=forward,
        run=partial(forward.run, StageModule.score),
        weights=weights,
    )


def load_weights(
    scorer: Scorer,
    checkpoint: Checkpoint,
    groups: Groups,
    *,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill the weights from a checkpoint of any grid, rounded to the compute dtype; under adapters from their base."""
    coded = scorer.weights.coded.values()
    in_codes = {span.param for each in coded for span in each.bucket.spans}
    params = dict.fromkeys(p for module in scorer.modules for p in module.parameters())
    blocks = [
        block
        for param in params
        if isinstance(param, ShardedParameter) and param not in in_codes
        for block in StateTensor(param=param, group=groups.replicas).blocks()
    ]
    job = scorer.plan.job
    if job.model.lora.r:
        held = set(checkpoint.names)
        base = open_base(
            checkpoint, job.model, start=job.checkpoint.model_dump(mode="json"), remedy=BASE_REMEDY
        )
        store, manifest = base.checkpoint

        def fill(under: Sequence[TensorBlock]) -> None:
            load(store, manifest, under, is_narrowing_allowed=True, progress=progress)
            finish_upcycling(base.upcycling, under, job.run.seed)

        fill([block for block in blocks if block.name not in held])
        # a base that is held as codes, bucket by bucket
        for each in coded:
            with scorer.weights.recoding(each.bucket) as frozen:
                fill(list(frozen.blocks()))
        blocks = [block for block in blocks if block.name in held]
    load(
        checkpoint.store,
        checkpoint.manifest,
        blocks,
        is_narrowing_allowed=True,
        progress=progress,
    )
