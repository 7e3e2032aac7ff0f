"""Speed of training steps on the GPU: a part of `gpu_day.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_parts import LARGE, SMALL, WIDE, Setting, built
from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.lookup import named_module, peak_flops
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.simulated_step import played_step


def measure_speed(setting: Setting) -> dict[str, Any]:
    """Return tokens a second, MFU, kernel time, gaps and launches of a step, by kind of kernels."""
    return {
        kernels: _speed(setting.plan(run={"kernels": kernels})) for kernels in ("eager", "compile")
    }


def measure_layers(setting: Setting) -> dict[str, Any]:
    """Return the same of layers as wide as Llama 2 7B's, with micro-batches of one row of 4,096 tokens."""
    model = SMALL if setting.is_small else WIDE
    return {
        kernels: _speed(setting.plan(batch=8, micro=1, model=model, run={"kernels": kernels}))
        for kernels in ("eager", "compile")
    }


def measure_experts(setting: Setting) -> dict[str, Any]:
    """Return the same of eight layers with 16 experts each, of which a token takes two."""
    model = SMALL if setting.is_small else {**LARGE, "num_layers": 8}
    moe = {"num_experts": 16, "top_k": 2, "intermediate_size": 2816}
    plan = setting.plan(batch=8, micro=2, model={**model, "moe": moe})
    return {"compile": _speed(plan)}


def _speed(plan: RunPlan) -> dict[str, Any]:
    """Measure a plan's steps, and predict them with the catalogue's figures of this device."""
    with built(plan) as rank:
        seconds = rank.seconds()
        kernels, launches = _profile(rank.step)
        name = torch.cuda.get_device_name()
    flops = rank_flops(plan)
    peak = peak_flops(name, dtype=plan.job.precision.dtype)
    busy_s = sum(kernels.values())
    tokens = plan.batch.global_batch_size * plan.job.data.seq_len
    return {
        "step_s": seconds, "tokens_per_s": tokens / seconds, "mfu": flops / seconds / peak if peak else None,
        "planned_s": _planned_s(plan, name), "launches": launches, "kernel_s": busy_s, "gaps_s": max(0.0, seconds - busy_s),
        "largest_kernels": {name[:80]: seconds for name, seconds in kernels.most_common(12)},
    }  # fmt: skip


def _planned_s(plan: RunPlan, device_name: str) -> float | None:
    device = named_module(device_name)
    return played_step(plan, device).total_s if device else None


def rank_flops(plan: RunPlan) -> float:
    """Return the model's FLOPs of a step."""
    tokens = plan.batch.global_batch_size * plan.job.data.seq_len
    return tokens * flops_per_token(plan.job.model, seq_len=plan.job.data.seq_len)


def _profile(call: Callable[[], object]) -> tuple[Counter[str], int]:
    """Return seconds by kernel, and the number of launches; profiling itself makes gaps longer."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    seconds: Counter[str] = Counter()
    count = 0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
            # copies are no launches of kernels
            count += not event.name.startswith(("Memcpy", "Memset"))
    return seconds, count
