"""A live teacher on the workers that train: frozen weights on the same grid, and its forward pass before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymega.box import Box
from raymega.checkpoint.format.manifest import read_blocks
from raymega.checkpoint.load.fingerprint import TEACHER
from raymega.checkpoint.load.foreign_reads import foreign_read
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.tools.inspection import open_root
from raymega.model.heads.score_head import language_head
from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import Context, MicroBatch, TeacherBatch
from raymega.parallel.data_parallel.state_tensors import StateTensor, TensorBlock
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.pipeline.executor import Executor
from raymega.plan.grid import Coords
from raymega.plan.run_plan import RunPlan, teacher_plan
from raymega.train.build_model import ModelWeights, build_weights, make_expert_groups, make_p2p
from raymega.train.forward_only import ForwardOnly


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """Part of a live teacher that one rank holds; it has no gradients and no optimizer state.

    Attributes:
        weights: Chunks of the teacher and their weights, cut over dp where those of the run are.
        forward: Forward-only pipeline of the teacher.
        replicas: Ranks that hold the same weights.
    """

    weights: ModelWeights
    forward: ForwardOnly
    replicas: Group

    def columns(self, hidden: Tensor) -> Tensor:
        """Return this rank's columns of the logits, [S, B, V/tp], of a residual stream [S/sp, B, D]; on the last stage.

        Under sharded weights it gathers the head's, so all replicas call it alike.
        """
        (head,) = [module.head for module in self.weights.modules if module.head is not None]
        self.weights.weights.wait_for(head)
        with torch.no_grad():
            return language_head(head).columns(hidden)

    def blocks(self) -> Iterator[TensorBlock]:
        """Yield the blocks that this rank keeps of the teacher's weights."""
        for state in self.weights.states:
            yield from StateTensor(param=state, group=self.replicas).blocks()
        for part in self.weights.frozen:
            yield from part.blocks()

    def add_to(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the teacher's residual stream, on ranks of the last stage."""
        found: list[Tensor] = self.forward.run(StageModule.evaluated, micro_batches)
        # logits of a whole step would be far larger, so the loss makes them
        if not found:  # not the last stage
            return list(micro_batches)
        return [
            replace(batch, teacher=TeacherBatch(hidden=hidden))
            for batch, hidden in zip(micro_batches, found, strict=True)
        ]


def build_teacher(  # noqa: PLR0913  # of an assembler, all that it assembles
    plan: RunPlan,
    coords: Coords,
    *,
    groups: Groups,
    context: Context,
    sp: SequenceParallel,
    log: CommLog,
    device: torch.device,
    progress: Callable[[], None],
) -> Teacher:
    """Build a rank's part of the live teacher of a run, with initial values where no checkpoint will fill it.

    Args:
        plan: Plan of the run.
        coords: Coordinates of the rank.
        groups: Groups of the run's ranks.
        context: Ranks that share the tokens.
        sp: Tensor-parallel ranks.
        log: Log of transfers.
        device: Device of the rank.
        progress: Callback after each instruction of a pass.
    """
    own = teacher_plan(plan)
    weights = build_weights(
        own,
        own.grid.rank(coords),
        groups=groups,
        context=context,
        experts=make_expert_groups(own.job, groups, sp=sp, log=log, device=device),
        device=device,
        has_initial_values=plan.job.distillation.teacher_checkpoint == "none",
    )

    def before_pass(executor: Executor[MicroBatch]) -> None:
        weights.weights.follow(
            unit
            for chunk, is_backward in executor.passes
            for unit in weights.modules[chunk].uses(is_backward=is_backward)
        )

    p2p = make_p2p(own, groups, token_degree=context.degree * sp.degree, device=device)
    forward = ForwardOnly(
        own, coords.pp, modules=weights.modules, p2p=p2p, before_pass=before_pass, progress=progress
    )
    return Teacher(weights=weights, forward=forward, replicas=groups.replicas)


def load_teacher(
    teacher: Teacher, uri: str, *, progress: Callable[[], None] = lambda: None
) -> None:
    """Fill a teacher's weights from a checkpoint of any grid, rounded to the compute format.

    Args:
        teacher: Teacher of this rank.
        uri: Checkpoint, as of distillation.teacher_checkpoint; with ``none`` the initial values stay.
        progress: Callback after each portion.
    """
    if uri == "none":
        return
    with foreign_read(TEACHER, uri):
        # sharded weights are read in parts, without a gather
        store, root = open_root(uri)
        blocks, places = list(teacher.blocks()), dict[str, list[Box]]()
        for block in blocks:
            places.setdefault(block.name, []).append(block.box)
        # of a large world's checkpoint only the boxes of these weights
        manifest = read_blocks(store, root.key, places)
        load(store, manifest, blocks, is_narrowing_allowed=True, progress=progress)
