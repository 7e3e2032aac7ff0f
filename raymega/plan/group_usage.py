"""Says over which groups of ranks a job sends nothing, so that they get no communicator.

A communicator costs start-up time on NCCL and gloo, and device memory on NCCL.
"""

from __future__ import annotations

from raymega.config.schema import Job
from raymega.plan.distillation.teacher import teacher_job
from raymega.plan.run_plan import RunPlan
from raymega.plan.tensor_table import embedding_tensors
from raymega.plan.zero_levels import ZeroLevel, data_parallel_shard_size, level_of

EXPERT_GROUPS = frozenset({"etp", "ep", "edp", "expert_sharers", "expert_copies"})


def unused_groups(plan: RunPlan) -> frozenset[str]:
    """Return the fields of `Groups` that no rank of the plan sends over."""
    job = plan.job
    # a live teacher sends over groups of its own model
    jobs = [job, teacher_job(job)] if job.distillation.is_live else [job]
    has_experts = any(each.model.moe.num_experts > 0 for each in jobs)
    # cp and dp: attention exchanges over parts of cp, and gradients are summed over dp * cp
    unused = {"cp", "dp"}
    # embeddings are gathered over dp, and so are images' features
    if job.model.head.kind == "embedding" or job.parallel.balance_images:
        unused.remove("dp")
    if not has_experts:
        unused |= EXPERT_GROUPS
    if not any(map(_counts_micro_batch, jobs)):
        unused.add("micro")
    # embedding: two copies of a trained token table on different ranks
    is_still = embedding_tensors(job.model)[0].is_frozen
    if is_still or not job.model.needs_token_table_last or plan.placement.are_ends_together:
        unused.add("embedding")
    # hybrid sharding: gradients are summed over the sharers, then over the copies
    if data_parallel_shard_size(job.parallel) and level_of(job.parallel) > ZeroLevel.NONE:
        unused |= {"replicas", "edp"}
    return frozenset(unused)


def _counts_micro_batch(job: Job) -> bool:
    """Return whether anything is summed over the ranks of a micro-batch: scales in fp8, or loads of experts."""
    moe = job.model.moe
    if job.precision.fp8 == "tensorwise":
        return True
    is_balanced = moe.load_balancing_type == "sinkhorn" or (
        moe.has_aux_loss and moe.load_balancing_type != "global"
    )
    return moe.num_experts > 0 and (is_balanced or moe.capacity_factor > 0)
