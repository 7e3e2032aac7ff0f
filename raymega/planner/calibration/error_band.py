"""State how far a prediction may be off: a band around its seconds, and whether it fits at all.

The bands are quantiles of errors on published runs whose sources the constants had not seen.
``python -m benchmarks.planner --leave-out`` prints them. A band is wide where no constant was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from statistics import NormalDist

from raymega.config.schema import Job
from raymega.plan.hardware.catalog import Accelerator

RULED_OUT = 0.05
"""Probability of fitting below which a run is ruled out for its memory."""
MEMORY_SPREAD = 0.12
"""Standard deviation of the logarithm of the predicted over the real peak, for other systems."""
OWN_MEMORY_SPREAD = 0.03
"""The same for raymega's own peak, which is held against torch's allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBand:
    """Range of a step's time over its prediction.

    Attributes:
        low: Factor of the prediction below which one step in ten is.
        high: Factor of the prediction above which one step in ten is.
        is_measured: Whether constants were fitted to runs on the device in the format.
        basis: Runs that the band is of, in words.
    """

    low: float
    high: float
    is_measured: bool
    basis: str


BANDS = {
    "dense": TimeBand(low=0.90, high=1.37, is_measured=True, basis="dense models"),
    "experts": TimeBand(low=0.66, high=2.29, is_measured=True, basis="models with experts"),
    "borrowed": TimeBand(low=0.65, high=2.3, is_measured=False, basis="other devices and formats"),
}
"""Bands of 80 %, as ``python -m benchmarks.planner --leave-out`` prints them."""


def format_of_job(job: Job) -> str:
    """Return the format of most products of a job."""
    if job.precision.dtype in ("float32", "float64"):
        return "32-bit" if job.precision.dtype == "float32" else "64-bit"
    return "8-bit" if job.precision.fp8 != "none" else "16-bit"


def band_of(job: Job, device: Accelerator, *, number_format: str = "") -> TimeBand:
    """Return the band of a prediction for ``job`` on ``device``.

    Args:
        job: Job whose step is predicted.
        device: Accelerator of every rank.
        number_format: Format of most products; by default the job's own.
    """
    if (number_format or format_of_job(job)) not in device.measured_formats:
        return BANDS["borrowed"]
    return BANDS["experts" if job.model.moe.num_experts else "dense"]


def fits_probability(num_bytes: float, device: Accelerator, *, is_own_system: bool = True) -> float:
    """Return the probability that a predicted peak of ``num_bytes`` fits into the device's memory."""
    spread = OWN_MEMORY_SPREAD if is_own_system else MEMORY_SPREAD
    return NormalDist().cdf(log(device.memory_bytes / num_bytes) / spread)
