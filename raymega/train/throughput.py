"""Measurements of a worker: tokens per second, MFU, busy time and memory in use."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Protocol

import torch

from raymega.parallel.comm.process_groups import WaitTimer
from raymega.pipeline.pass_timer import PassTimer
from raymega.plan.flops import job_flops_per_token
from raymega.plan.hardware.lookup import peak_flops
from raymega.plan.run_plan import RunPlan

STATM = Path("/proc/self/statm")


class SizedRows(Protocol):
    """Measures of rows that decide how much work one is.

    Attributes:
        context: Mean length of a document that a token attends in; S without packing.
        efficiency: Share of the rows' tokens that are not padding.
    """

    context: float
    efficiency: float


class ThroughputMeter:
    """Conversion of a step's samples and seconds into speeds of the run and of one worker."""

    def __init__(self, plan: RunPlan, device: torch.device, rows: SizedRows) -> None:
        """Look up the device's peak; a device that is not in the table has no MFU."""
        self._world_size = plan.grid.world_size
        self._tokens_per_sample = plan.job.data.seq_len * rows.efficiency
        self._flops = job_flops_per_token(plan.job, seq_len=rows.context)
        self._has_images = plan.job.model.vision.is_on
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, dtype=plan.job.precision.dtype)

    def metrics(
        self, *, samples: int, seconds: float, image_tokens: int = 0, images: float = 0.0
    ) -> dict[str, float]:
        """Return the speeds of a step of ``samples`` rows by metric name; ``train/mfu`` only where the peak is known.

        Tokens without a label that counts are work too: those of a prompt, and an encoder's that are not masked.
        """
        tokens = samples * self._tokens_per_sample
        per_worker = tokens / seconds / self._world_size
        flops = per_worker * self._flops
        speeds = {
            "train/step_time_s": seconds,
            "train/tokens_per_s": tokens / seconds,
            "train/tokens_per_s_per_worker": per_worker,
            "train/tflops_per_worker": flops / 1e12,
        }
        if self._has_images:
            speeds["train/images_per_s"] = images / seconds
            speeds["data/image_token_share"] = image_tokens / tokens
        return speeds | ({"train/mfu": flops / self._peak} if self._peak else {})


class BusyTimeMeter:
    """Meter of a rank's own work in a step.

    On CPUs it is wall time less the waits for other ranks. On a GPU, whose work the host only queues, it is the
    device time of the passes of the newest step.
    """

    def __init__(self, device: torch.device, waited: WaitTimer, passes: PassTimer) -> None:
        self._is_host, self._waited, self._passes = device.type == "cpu", waited, passes
        self._began_s = self._waited_s = self._work_s = 0.0
        self._num_steps = 0

    def __enter__(self) -> None:
        """Start the clock at the begin of a step."""
        self._began_s, self._waited_s = time.monotonic(), self._waited.seconds
        self._passes.begin_step()

    def __exit__(self, *_: object) -> None:
        """Add the step's work, without the waits that the groups' timer counted meanwhile."""
        wall_s = time.monotonic() - self._began_s
        self._work_s += wall_s - (self._waited.seconds - self._waited_s)
        self._num_steps += 1

    def pop_metrics(self) -> dict[str, float]:
        """Return the mean work in seconds of the steps since the last call; on a GPU that of the last step."""
        mean_s = self._work_s / max(1, self._num_steps)
        self._work_s, self._num_steps = 0.0, 0
        if self._is_host:
            return {"worker/work_s": mean_s}
        passes_s = self._passes.seconds()
        return {} if passes_s is None else {"worker/work_s": passes_s}


def reset_peak_memory(device: torch.device) -> None:
    """Restart the GPU's peak count; the peak of a CPU process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return bytes in use and their peak: of torch's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        return {
            "memory/peak_bytes": float(torch.cuda.max_memory_allocated(device)),
            "memory/allocated_bytes": float(torch.cuda.memory_allocated(device)),
        }
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory/peak_bytes": float(peak)} | _resident()


def _resident() -> dict[str, float]:
    """Return the process's resident bytes; empty on systems without /proc."""
    if not STATM.exists():
        return {}
    pages = int(STATM.read_text().split()[1])
    return {"memory/allocated_bytes": float(pages * resource.getpagesize())}
