"""The parts of `gpu_day.py`: each function measures one thing on the GPU and returns its figures."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_parity import errors
from raymega.checkpoint.save.host_copy import HostCopy
from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.parallel.comm import world
from raymega.parallel.comm.process_groups import groups_of_plan
from raymega.parallel.expert_parallel.grouped_gemm import group_sizes, grouped_product
from raymega.plan.hardware.lookup import peak_flops
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.train.build import build_parts
from raymega.train.environment import prepare_process
from raymega.train.state import first_state
from raymega.train.step import train_step

GPU = torch.device("cuda", 0)
TOLERANCE = 0.03
"""Largest error of a function whose inputs and outputs are in bfloat16."""
LARGE = {
    "family": "llama", "num_layers": 24, "hidden_size": 2048, "num_heads": 16, "ffn_hidden_size": 5504,
    "vocab_size": 32000, "max_positions": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of 1.3 billion parameters."""
SMALL = {
    **LARGE,
    "num_layers": 4,
    "hidden_size": 256,
    "num_heads": 4,
    "ffn_hidden_size": 688,
    "vocab_size": 1024,
}
WIDE = {
    **LARGE,
    "num_layers": 8,
    "hidden_size": 4096,
    "num_heads": 32,
    "ffn_hidden_size": 11008,
    "max_positions": 4096,
}
"""Eight layers of Llama 2 7B, with its embedding and head."""
ROUNDS = 8
CPU_THREADS = 4
"""Threads of a run on the CPU: more would wait for each other at a model this small."""
SANITIZERS = {"memcheck": (), "racecheck": ("--racecheck-report", "all")}
"""Tools of compute-sanitizer, with their options: racecheck names each hazard and what it makes of them."""
MOST_LINES, LAST_LINES = 200, 20
"""Lines of findings that are kept, and of the end of the output."""
CYCLES_A_S = 1.5e9
"""Cycles of the GPU's clock in about a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings of all parts: shapes, and whether the device executes anything."""

    is_small: bool
    is_stand_in: bool

    def plan(
        self, *, batch: int = 8, micro: int = 4, device: str = "cuda", **sections: Any
    ) -> RunPlan:
        """Return the plan of one rank with the part's model; values for small shapes are smaller."""
        model = sections.pop("model", SMALL if self.is_small else LARGE)
        seq_len = 256 if model is SMALL else model["max_positions"]
        job = {
            "run": {"name": "gpu-day", "steps": 10**6, "eval_samples": 0, **sections.pop("run", {})},
            "model": model, "cluster": {"device": device},
            "data": {"path": "synthetic", "seq_len": seq_len, "global_batch_size": batch},
            "schedule": {"micro_batch_size": micro},
            "optimizer": {"lr": 3e-4, "lr_schedule": "constant"},
            "precision": {"dtype": "bfloat16", **sections.pop("precision", {})}, **sections,
        }  # fmt: skip
        plan = make_plan(parse_mapping(job).job())
        # the stand-in computes nothing: values that the host reads are put in
        if self.is_stand_in and device == "cuda":
            from tests.cuda_books import answers

            answers.put_in(plan)
        return plan


class Rank:
    """Rank of a plan with its training step."""

    def __init__(self, plan: RunPlan) -> None:
        self.device = prepare_process(plan, device=plan.job.cluster.device, local_rank=0)
        groups = groups_of_plan(plan, 0, timeout_s=60.0)
        self.parts = build_parts(plan, rank=0, groups=groups, device=self.device)
        self.state = first_state(plan.job.precision)
        self.plan = plan

    def step(self) -> float:
        """Train a step and return its loss; the host has read it, so the device is done with the passes."""
        outcome = train_step(self.parts, self.state, Requests(), is_recording=False)
        self.state = outcome.state
        return outcome.loss

    def seconds(self) -> float:
        """Return the median seconds of a step."""
        # compile, choose algorithms and fill the allocator's cache before the clock runs
        for _ in range(3):
            self.step()
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return median(times)

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.plan.batch.global_batch_size * self.plan.job.data.seq_len


@contextmanager
def built(plan: RunPlan) -> Iterator[Rank]:
    """Build a rank, and give its memory back."""
    rank = Rank(plan)
    try:
        yield rank
    finally:
        # cycles of modules and hooks hold tensors until they are collected
        del rank
        gc.collect()
        torch.cuda.empty_cache()


def leave() -> None:
    """End the process at once: the stand-in's allocator would wait for a device."""
    os._exit(0)


def measure_parity(setting: Setting) -> dict[str, Any]:
    """Return the error of each function against float64 on the CPU, and those above the tolerance."""
    if setting.is_stand_in:
        from tests.cuda_books import answers

        answers.use_flash_attention()
    found = errors(64 if setting.is_small else 1024, GPU)
    wrong = [name for name, error in found.items() if not error <= TOLERANCE]
    return {"errors": found, "above_tolerance": [] if setting.is_stand_in else wrong}


def measure_curve(setting: Setting) -> dict[str, Any]:
    """Return the losses of a small model on the GPU, and their largest gaps from those of the CPU in float32."""
    steps, curves = 3 if setting.is_stand_in else 50, {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        plan = setting.plan(
            batch=4, micro=2, device=device, model=SMALL, precision={"dtype": dtype}
        )
        with built(plan) as rank:
            torch.set_num_threads(CPU_THREADS)
            curves[f"{device}, {dtype}"] = [rank.step() for _ in range(steps)]
    wanted = curves["cpu, float32"]
    gaps = {
        name: max(abs(ours - theirs) for ours, theirs in zip(curve, wanted, strict=True))
        for name, curve in curves.items()
    }
    return {"losses": curves, "largest_gaps": gaps}


def measure_fp8(setting: Setting) -> dict[str, Any]:
    """Return seconds of a step of 7B's layers by fp8 recipe, and the gain over bfloat16."""
    model = SMALL if setting.is_small else WIDE
    recipes = ("none", "rowwise", "tensorwise")
    seconds = {}
    for recipe in recipes:
        with built(setting.plan(micro=1, model=model, precision={"fp8": recipe})) as rank:
            seconds[recipe] = rank.seconds()
    gains = {recipe: seconds["none"] / seconds[recipe] for recipe in recipes[1:]}
    return {"step_s": seconds, "gain": gains}


def measure_memory(setting: Setting) -> dict[str, Any]:
    """Return the allocator's peak beside the planned one, and what driver and libraries take."""
    plan = setting.plan()
    with built(plan) as rank:
        for _ in range(3):
            rank.step()
        # the peak of a step in steady state, not of the start
        torch.cuda.reset_peak_memory_stats()
        rank.step()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
    # the planner's figure for this one rank
    use = pipeline_memory(plan)[0][0]
    planned = use.state_bytes + use.activation_bytes
    return {
        "peak_bytes": peak, "planned_bytes": planned, "relative_error": planned / peak - 1,
        "reserved_bytes": reserved, "outside_allocator_bytes": total - free - reserved,
    }  # fmt: skip


def measure_grouped(setting: Setting) -> dict[str, Any]:
    """Return the FLOPs a second of grouped products by number of experts, and their share of the peak."""
    rows, width, inner = (512, 128, 256) if setting.is_small else (16384, 4096, 14336)
    peak, found = peak_flops(torch.cuda.get_device_name(), dtype="bfloat16"), {}
    # few large experts, and many small ones with the same work in all
    for experts in (8, 64):
        x = torch.randn(rows, width, device=GPU, dtype=torch.bfloat16)
        weight = torch.randn(
            experts, width, inner // max(1, experts // 8), device=GPU, dtype=torch.bfloat16
        )
        counts = torch.full((experts,), rows // experts, device=GPU)
        sizes = group_sizes(x, counts, inner=weight.shape[2])
        seconds = _seconds_of(lambda x=x, w=weight, s=sizes: grouped_product(x, w, s))
        rate = 2 * x.numel() * weight.shape[2] / seconds
        found[str(experts)] = {"flops_per_s": rate, "share": rate / peak if peak else None}
    return found


def _seconds_of(call: Callable[[], object]) -> float:
    """Return the median seconds of a call on the device."""
    call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)


def measure_offload(setting: Setting) -> dict[str, Any]:
    """Return seconds of a step with and without offloaded activations, and with the optimizer on the host."""
    seconds = {}
    for name in ("nothing", "activations", "optimizer"):
        memory = {} if name == "nothing" else {"memory": {"offload": (name,)}}
        with built(setting.plan(**memory)) as rank:
            # the host's update uses the cores that a worker would reserve
            torch.set_num_threads(os.cpu_count() or 1)
            seconds[name] = rank.seconds()
    return {"step_s": seconds}


def measure_checkpoint(setting: Setting) -> dict[str, Any]:
    """Return the seconds of pinning host memory, and of copies to it, beside and without products."""
    found = {}
    for gib in (0.01,) if setting.is_small else (1, 8):
        num_bytes = int(gib * 2**30)
        state, copy = torch.zeros(num_bytes, dtype=torch.uint8, device=GPU), HostCopy()
        began = time.perf_counter()
        # pinning is slow and done once a run; the copies come with each save
        copy.reserve(num_bytes, is_pinned=True)
        pinned_s = time.perf_counter() - began
        began = time.perf_counter()
        copy.copy([(0, state)])
        held_s = time.perf_counter() - began
        copy.wait()
        copied_s = time.perf_counter() - began
        found[f"{gib} GiB"] = {"pin_s": pinned_s, "host_held_s": held_s, "copy_s": copied_s}
    return found


def measure_nccl(setting: Setting) -> dict[str, Any]:
    """Return seconds of opening a world of one, and of aborting it while a kernel runs, five times."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        world.open_world(
            rank=0,
            world_size=1,
            rendezvous="127.0.0.1:1",
            store=dist.HashStore(),
            timeout_s=60.0,
            device=GPU,
        )
        dist.all_reduce(torch.ones(1, device=GPU))
        torch.cuda.synchronize()
        opened_s = time.perf_counter() - began
        _spin(setting, seconds=1.0)
        began = time.perf_counter()
        world.abort_world()
        aborted_s = time.perf_counter() - began
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        rounds.append({"open_s": opened_s, "abort_s": aborted_s, "used_bytes": total - free})
    return {"rounds": rounds, "leaked_bytes": rounds[-1]["used_bytes"] - rounds[1]["used_bytes"]}


def measure_loading(setting: Setting) -> dict[str, Any]:
    """Return how long first launches of kernels wait behind a kernel that spins on another stream.

    A posted receive is such a kernel. If a first launch waits for the device, a receive that is posted too
    early stops its own sender.
    """
    # the kernel that spins stands for a posted receive
    side = torch.cuda.Stream()
    x = torch.ones(1024, device=GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _spin(setting, seconds=1.0)
    waited = {}
    for name, call in {
        "first erfinv": x.erfinv,
        "first digamma": x.digamma,
        "second digamma": x.digamma,
    }.items():
        began = time.perf_counter()
        call()
        waited[name] = time.perf_counter() - began
    began = time.perf_counter()
    side.synchronize()
    return {"launch_s": waited, "spun_on_s": time.perf_counter() - began}


def _spin(setting: Setting, *, seconds: float) -> None:
    """Occupy the current stream for some seconds."""
    torch.cuda._sleep(1 if setting.is_small else int(seconds * CYCLES_A_S))


def measure_sanitizer(setting: Setting) -> dict[str, Any]:
    """Return what compute-sanitizer says of the compiled kernels, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or setting.is_stand_in:
        return {"skipped": "compute-sanitizer is not on the path"}
    script = "from benchmarks import gpu_parts; gpu_parts.errors(64, gpu_parts.GPU)"
    running = {
        kind: subprocess.Popen(
            [tool, "--tool", kind, *options, "--kernel-regex", "kns=triton", sys.executable, "-c", script],
            stdout=subprocess.PIPE, text=True,
        )
        for kind, options in SANITIZERS.items()
    }  # fmt: skip
    return {kind: findings(each.communicate()[0]) for kind, each in running.items()}


def findings(text: str) -> list[str]:
    """Return what a sanitizer printed of each error and warning, whole, and the end of its output.

    A finding begins with a line that says ``Error`` or ``Warning``; indented lines of it follow, of accesses,
    kernels and source lines.
    """
    lines, kept, is_finding = text.strip().splitlines(), [], False
    for line in lines:
        words = line.removeprefix("=========")
        if words.strip() and not words.startswith("  "):
            is_finding = any(word in words.lower() for word in ("error", "warn", "hazard", "race"))
        if is_finding and words.strip():
            kept.append(line)
    # the end says how many there were, or why the tool could not run
    return [*kept[:MOST_LINES], "end of the output:", *lines[-LAST_LINES:]]
