"""Compare a published run with its prediction: seconds, FLOP/s and memory.

``raymega.planner.calibration.published_runs`` turns a row of the table into plans. Nothing is
fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import activation_shape
from raymega.plan.memory.state_bytes import DTYPE_BYTES, state_of
from raymega.plan.run_plan import RunPlan
from raymega.plan.tensor_table import layer_tensors
from raymega.planner.calibration.published_runs import PublishedRun
from raymega.planner.cost.peak_memory import RESERVED_BYTES, memory_use
from raymega.planner.cost.rank_classes import rank_kinds
from raymega.planner.cost.stage_cost import StageCosts
from raymega.planner.cost.step_time import step_time
from raymega.planner.kernels.system_traits import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedComparison:
    """Published run with its prediction.

    Attributes:
        run: Published run with the printed figures, each 0 where the source printed none.
        plan: Plan that the prediction is for.
        iter_s: Predicted seconds of a step.
        tflops: Predicted FLOP/s of a GPU in units of 1e12. They use the source's own count of
            operations where it printed FLOP/s, so they differ from it as the seconds do.
        memory_gib: Predicted peak of the allocator, in GiB.
        fits: Whether any plan of the row fits into the device's memory.
    """

    run: PublishedRun
    plan: RunPlan
    iter_s: float
    tflops: float
    memory_gib: float
    fits: bool


def compare(run: PublishedRun, device: Accelerator) -> PublishedComparison:
    """Return the prediction for the fastest plan that the row allows and that fits into memory.

    When no plan fits, it is the fastest of all.
    """
    fitting = [plan for plan in run.candidates if _needs(plan, run.software) <= device.memory_bytes]

    def seconds(plan: RunPlan) -> float:
        return step_time(plan, device, run.software, fp8_coverage=run.fp8_coverage).total_s

    plan = min(fitting or run.candidates, key=seconds)
    iter_s = seconds(plan)
    flops = flops_per_token(plan.job.model, seq_len=plan.job.data.seq_len)
    tokens = plan.batch.global_batch_size * plan.job.data.seq_len
    tflops = flops * tokens / run.num_gpus / iter_s / 1e12
    if run.tflops and run.iter_s:
        tflops = run.tflops * run.iter_s / iter_s
    allocated = _needs(plan, run.software) - RESERVED_BYTES
    return PublishedComparison(
        run=run, plan=plan, iter_s=iter_s, tflops=tflops, memory_gib=allocated / 2**30,
        fits=bool(fitting),
    )  # fmt: skip


def _needs(plan: RunPlan, software: Software) -> float:
    """Return the bytes of the fullest rank under the published system.

    A system that gathers tensor by tensor holds two tensors instead of two blocks, and their
    gradients in its own format. What kernels hold is left out, as it is not known of other systems.
    """
    job = plan.job
    shape = replace(activation_shape(job), has_working_memory=False)
    needs = memory_use(plan, costs=StageCosts(shape)).total_bytes
    if not software.gathers_tensors:
        return needs
    held = rank_kinds(plan)[0].elements
    passing = state_of(job, held, plan.grid).passing_bytes
    largest = max(tensor.num_elements for tensor in layer_tensors(job.model, 0))
    element = DTYPE_BYTES[job.precision.dtype]
    # Two tensors in place of two blocks, with gradients of the system's format.
    share = largest / held.block * (element + software.gradient_bytes) / (element + 4)
    return needs - passing * (1 - share)
