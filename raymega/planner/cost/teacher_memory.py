"""Count the bytes that a live teacher takes on a rank: its weights, and what its passes and its loss hold."""

from __future__ import annotations

from dataclasses import dataclass

from raymega.plan.memory.activation_bytes import vocabulary_rows
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements, state_of
from raymega.plan.run_plan import RunPlan, teacher_plan
from raymega.planner.cost.working_memory import working_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherMemory:
    """Bytes of a live teacher on one rank.

    Attributes:
        state_bytes: Bytes of its weights, and of tables that no step changes.
        kept_bytes: Bytes from its pass to the step's last loss: the residual streams of all micro-batches, on the
            last stage; and the gradient of a micro-batch's divergence.
        loss_bytes: Bytes in the divergence: the teacher's logits, and both models' log-probabilities with their ratio.
        pass_bytes: Bytes that its forward pass holds at most, when the model has no activation.
    """

    state_bytes: int = 0
    kept_bytes: int = 0
    loss_bytes: int = 0
    pass_bytes: int = 0


def teacher_memory(plan: RunPlan, pp_rank: int) -> TeacherMemory:
    """Return the bytes of a plan's teacher on the ranks at ``pp_rank``; none without a teacher.

    Stored logits are read by the loader, and are of the loss alone.
    """
    if not plan.job.distillation.is_on:
        return TeacherMemory()
    student = activation_shape(plan.job)
    stages = plan.chunks_of(pp_rank)
    is_last = any(stage.is_last for stage in stages)
    logits = student.tokens * vocabulary_rows(student) * is_last
    if not plan.job.distillation.is_live:
        return TeacherMemory(kept_bytes=logits * student.element, loss_bytes=logits * student.wide)
    teacher = teacher_plan(plan)
    own, shape = teacher.chunks_of(pp_rank), activation_shape(teacher.job)
    state = state_of(teacher.job, rank_elements(teacher.job, own, teacher.grid), teacher.grid)
    streams = plan.batch.num_micro_batches * shape.stream_bytes * is_last
    # a forward holds about what its backward holds beside the gradients: the wider half of a block
    has_experts = any(map(shape.blocks_with_experts, own))
    working = working_memory(shape, has_experts=has_experts)
    widest = max(working.feed_forward, working.attention, 0) + 2 * shape.stream_bytes
    return TeacherMemory(
        state_bytes=state.total_bytes,
        kept_bytes=streams + logits * student.element,
        loss_bytes=logits * (student.element + 3 * student.wide),
        pass_bytes=streams + widest,
    )
