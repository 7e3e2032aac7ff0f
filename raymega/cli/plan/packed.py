"""What `raymega plan` says of packed documents, static and dynamic; no logic of its own."""

from __future__ import annotations

from dataclasses import asdict

from raymega import api
from raymega.plan.packing.step_estimate import MOST_RANKS, PackedStep
from raymega.plan.run_plan import RunPlan


def packing_object(plan: RunPlan) -> dict[str, object]:
    """For ``--json``; empty when nothing is packed."""
    if plan.job.data.packing == "none":
        return {}
    step, why = api.look_at_packing(plan)
    return {"packing": asdict(step) if step else {"unknown": why}}


def show_packing(plan: RunPlan) -> None:
    """For people; nothing when nothing is packed."""
    if plan.job.data.packing == "none":
        return
    step, why = api.look_at_packing(plan)
    seq_len, cp = plan.job.data.seq_len, plan.job.parallel.cp
    print(
        f"\npacked documents: a micro-batch has {seq_len // cp * plan.batch.micro_batch_size:,} tokens a "
        "rank at most, so activations are those above"
    )
    if step is None:
        print(f"documents are not known here ({why}): a row is one document at the worst, as above")
        return
    print(
        f"the first step's {plan.batch.global_batch_size} rows hold {step.num_documents:,} documents, "
        f"{step.efficiency:.1%} of their tokens; attention sees {step.attention_share:.1%} of the pairs "
        "that rows without documents have"
    )
    print(
        f"static cp {cp}: {_seconds(step.static_s)} on the fullest stage, the busiest rank has "
        f"{step.static_imbalance:.2f} times the mean work"
    )
    if plan.job.parallel.dynamic_cp:
        _show_dynamic(step)


def _show_dynamic(step: PackedStep) -> None:
    found = step.dynamic
    if found is None:
        print(f"dynamic cp: not tried here for more than {MOST_RANKS} ranks of dp * cp")
        return
    print(
        f"dynamic cp: {_seconds(found.seconds)} ({step.static_s / found.seconds:.2f} times as fast), "
        f"the busiest rank {found.imbalance:.2f} times the mean; {found.num_micro_batches} micro-batches, "
        f"a token's pack on {found.mean_ranks:.2f} ranks on average and {found.most_ranks} at the most"
    )


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms of an H100"
