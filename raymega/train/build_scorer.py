"""Assembly of what a rank needs to score tokens: weights and a forward-only pipeline, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import Context, MicroBatch, make_context
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.state_tensors import StateTensor
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.token_scores import TokenScores
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.run_plan import RunPlan
from raymega.schedule.table import make_forward_only
from raymega.train.build import TrainingComponents, make_expert_groups, make_p2p
from raymega.train.build_model import build_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Weights of one rank, and its part of a forward-only pipeline.

    Attributes:
        modules: Model chunks, in the order of their stages.
        context: Ranks that share a row's tokens.
        has_scores: True on ranks that hold the last stage.
        run: Function that returns the scores of each micro-batch, in order; none without the last stage.
    """

    modules: tuple[StageModule, ...]
    context: Context
    has_scores: bool
    run: Callable[[Sequence[MicroBatch]], list[TokenScores]]


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
    sp = SequenceParallel(tp=groups.tp, is_sequence_parallel=job.parallel.sequence_parallel)
    log = CommLog()
    context = make_context(groups, job.parallel, log)
    modules = build_weights(
        plan,
        rank,
        groups=groups,
        context=context,
        experts=make_expert_groups(job, groups, sp=sp, log=log, device=device),
        device=device,
        has_initial_values=False,
    ).modules
    p2p = make_p2p(plan, groups, token_degree=context.degree * sp.degree, device=device)
    return _scorer(plan, rank, modules, p2p=p2p, device=device, progress=progress)


def scorer_of(parts: TrainingComponents, progress: Callable[[], None]) -> Scorer:
    """Return a scorer with the weights of a rank that trains; they may be sharded."""
    module, plan = parts.modules[0], parts.plan
    degree = module.context.degree * module.tp_stream.degree

    def before(executor: Executor[MicroBatch]) -> None:
        parts.weights.start_gather()
        parts.follow_weights(executor)

    return _scorer(
        plan,
        plan.grid.rank(parts.coords),
        parts.modules,
        p2p=make_p2p(plan, parts.groups, token_degree=degree, device=parts.device),
        device=parts.device,
        progress=progress,
        before=before,
    )


def _scorer(  # noqa: PLR0913  # what both kinds of scorers have in common
    plan: RunPlan,
    rank: int,
    modules: Sequence[StageModule],
    *,
    p2p: PointToPoint,
    device: torch.device,
    progress: Callable[[], None],
    before: Callable[[Executor[MicroBatch]], None] = lambda _executor: None,
) -> Scorer:
    """Return the forward-only pipeline; ``before`` is called with the executor before each run."""
    sp = modules[0].tp_stream
    # the last stage keeps its scores, as an executor only adds up losses
    found: list[TokenScores] = []

    def score(module: StageModule, micro_batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        output = module.score(micro_batch, hidden)
        if not isinstance(output, TokenScores):
            return output
        found.append(output)
        return torch.zeros((), device=device)

    @cache
    def executor_for(num_micro_batches: int) -> Executor[MicroBatch]:
        program = make_forward_only(plan.placement, num_micro_batches)
        stage_fns = [partial(score, module) for module in modules]
        pp_rank = plan.grid.coords(rank).pp
        return Executor(program.lists[pp_rank], stage_fns, p2p, progress=progress)

    def run(micro_batches: Sequence[MicroBatch]) -> list[TokenScores]:
        found.clear()
        lengths = [batch.tokens.shape[1] // sp.degree for batch in micro_batches]
        executor = executor_for(len(micro_batches))
        before(executor)
        executor.run(micro_batches, is_recording=False, lengths=lengths)
        return list(found)

    return Scorer(
        modules=tuple(modules),
        context=modules[0].context,
        has_scores=any(stage.is_last for stage in plan.stages_of(rank)),
        run=run,
    )


def load_weights(
    scorer: Scorer,
    checkpoint: Checkpoint,
    groups: Groups,
    *,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill the weights from a checkpoint of any grid, rounded to the compute dtype."""
    params = dict.fromkeys(p for module in scorer.modules for p in module.parameters())
    blocks = [
        block
        for param in params
        if isinstance(param, ShardedParameter)
        for block in StateTensor(param=param, group=groups.replicas).blocks()
    ]
    load(
        checkpoint.store,
        checkpoint.manifest,
        blocks,
        is_narrowing_allowed=True,
        progress=progress,
    )
