"""Text of a live teacher on the ranks of a plan: its model, and what it takes of the fullest rank."""

from __future__ import annotations

from raymega.cli.plan.host_memory import readable
from raymega.plan.memory.state_bytes import count_parameters
from raymega.plan.run_plan import RunPlan, teacher_plan
from raymega.planner.cost.teacher_memory import TeacherMemory, teacher_memory


def most_teacher_memory(plan: RunPlan) -> TeacherMemory:
    """Return what a teacher takes of the rank of the pipeline that it takes most of."""
    uses = (teacher_memory(plan, pp_rank) for pp_rank in range(plan.grid.pp))
    return max(uses, key=lambda use: use.state_bytes + use.kept_bytes)


def show_teacher(plan: RunPlan) -> None:
    """Print a live teacher; nothing without one."""
    if not plan.job.distillation.is_live:
        return
    teacher, use = teacher_plan(plan), most_teacher_memory(plan)
    layers = [
        sum(stage.num_layers for stage in teacher.chunks_of(pp)) for pp in range(plan.grid.pp)
    ]
    print(
        f"\nteacher: {teacher.job.model.family}, {count_parameters(teacher.job.model):,} parameters, frozen; "
        f"layers of each rank of the pipeline: {', '.join(map(str, layers))}"
    )
    print(
        f"its weights take at most {readable(use.state_bytes)} of a rank, what its pass leaves for the loss "
        f"{readable(use.kept_bytes)}, the divergence {readable(use.loss_bytes)} more"
    )
