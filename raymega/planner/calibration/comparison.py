"""Compare a published run with its prediction: seconds with their band, FLOP/s and memory.

``raymega.planner.calibration.published_runs`` turns a row of the table into plans. Nothing is
fitted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.catalog import Accelerator, Fitted
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import DTYPE_BYTES, state_of
from raymega.plan.run_plan import RunPlan
from raymega.plan.tensor_table import layer_tensors
from raymega.plan.zero_levels import ZeroLevel, level_of
from raymega.planner.calibration.error_band import (
    RULED_OUT,
    TimeBand,
    band_of,
    fits_probability,
)
from raymega.planner.calibration.published_runs import PublishedRun
from raymega.planner.cost.peak_memory import RESERVED_BYTES, memory_use
from raymega.planner.cost.rank_classes import rank_kinds
from raymega.planner.cost.stage_cost import StageCosts
from raymega.planner.cost.step_time import step_time
from raymega.planner.kernels.kernel_time import STREAM_SHARE
from raymega.planner.kernels.system_traits import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedComparison:
    """Published run with its prediction.

    Attributes:
        run: Published run with the printed figures, each 0 where the source printed none.
        plan: Plan that the prediction is for.
        iter_s: Predicted seconds of a step.
        band: Range of the step's time over its prediction.
        tflops: Predicted FLOP/s of a GPU in units of 1e12. They use the source's own count of
            operations where it printed FLOP/s, so they differ from it as the seconds do.
        memory_gib: Predicted peak of the allocator, in GiB.
        fits_probability: Probability that a plan of the row fits into the device's memory.
    """

    run: PublishedRun
    plan: RunPlan
    iter_s: float
    band: TimeBand
    tflops: float
    memory_gib: float
    fits_probability: float

    @property
    def fits(self) -> bool:
        """Answer to whether the run fits: False where its memory rules it out."""
        return self.fits_probability >= RULED_OUT


def compare(run: PublishedRun, fitted: Fitted | None = None) -> PublishedComparison:
    """Return the prediction for the fastest plan that the row allows and that fits into memory.

    When no plan fits, it is the one that needs the least.

    Args:
        run: Run that is not skipped.
        fitted: Constants of the device; the catalogue's by default.
    """
    assert run.device is not None, "a skipped run has no prediction"
    # Price every plan that the row allows.
    device = _with_constants(run, run.device, fitted)
    made = [_priced(run, plan, device) for plan in run.candidates]
    choices = [*made, *_partly_recomputed(made, device)] if run.has_open_recompute else made
    # The fastest that fits, at the first level of sharding that has one; else the smallest.
    fitting = [each for each in choices if each.num_bytes <= device.memory_bytes]
    level = min((each.sharding for each in fitting), default=ZeroLevel.NONE)
    least = min(made, key=lambda each: each.num_bytes)
    found = min(
        (each for each in fitting if each.sharding == level),
        key=lambda each: each.seconds,
        default=least,
    )
    # Its FLOP/s, by the source's own count where there is one.
    plan, iter_s = found.plan, found.seconds
    flops = flops_per_token(plan.job.model, seq_len=plan.job.data.seq_len)
    tokens = plan.batch.global_batch_size * plan.job.data.seq_len
    tflops = flops * tokens / run.num_gpus / iter_s / 1e12
    if run.tflops and run.iter_s:
        tflops = run.tflops * run.iter_s / iter_s
    return PublishedComparison(
        run=run, plan=plan, iter_s=iter_s, tflops=tflops,
        memory_gib=(found.num_bytes - RESERVED_BYTES) / 2**30,
        band=band_of(plan.job, run.device, number_format=run.number_format),
        fits_probability=fits_probability(least.num_bytes, device, is_own_system=False),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Priced:
    """Plan with its predicted seconds and bytes."""

    plan: RunPlan
    seconds: float
    num_bytes: float

    @property
    def sharding(self) -> ZeroLevel:
        """Level of sharding of the plan."""
        return level_of(self.plan.job.parallel)


def _priced(run: PublishedRun, plan: RunPlan, device: Accelerator) -> _Priced:
    time = step_time(plan, device, run.software, fp8_coverage=run.fp8_coverage)
    return _Priced(plan=plan, seconds=time.total_s, num_bytes=_needs(plan, run.software))


def _partly_recomputed(made: Sequence[_Priced], device: Accelerator) -> Iterator[_Priced]:
    """Yield plans that recompute as many blocks as it takes to fit, of those that need it.

    Systems have such a setting (Megatron-LM's recompute_num_layers). Seconds and bytes are taken to
    lie in proportion between those of no recompute and of full recompute.
    """
    # Plans that differ in recompute alone belong together.
    by_choice: dict[tuple[object, ...], dict[str, _Priced]] = {}
    for each in made:
        job = each.plan.job
        key = (job.schedule.micro_batch_size, job.schedule.chunks, job.parallel.sharding)
        by_choice.setdefault(key, {})[job.memory.recompute] = each
    for kinds in by_choice.values():
        none, full = kinds.get("none"), kinds.get("full")
        if none and full and full.num_bytes < device.memory_bytes < none.num_bytes:
            share = (none.num_bytes - device.memory_bytes) / (none.num_bytes - full.num_bytes)
            seconds = none.seconds + share * (full.seconds - none.seconds)
            yield _Priced(plan=full.plan, seconds=seconds, num_bytes=device.memory_bytes)


def _with_constants(run: PublishedRun, device: Accelerator, fitted: Fitted | None) -> Accelerator:
    """Return the device with other constants, and as fast as the run's system counts traffic."""
    if fitted is not None:
        device = replace(device, fitted=fitted)
        device = device.with_4_bit_products() if run.number_format == "4-bit" else device
    # Systems before fused attention had kernels whose traffic is counted in full.
    if run.software.has_fused_attention:
        return device
    return replace(device, fitted=replace(device.fitted, memory_share=STREAM_SHARE))


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
