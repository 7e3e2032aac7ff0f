"""Prints CPU milliseconds that the host needs for a layer of one micro-batch, forward and backward, by case.

A step of all layers less one of half of them, without trace and notes: threads of the process together, on a core that
should be idle. Beside it stands what the device needs by the roofline's budget, the whole step's over its layers.

    python -m tests.cuda_books.roofline.host --build build/cuda-books [--case "llama 7B, tp8 sp"] [--steps 5]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from raymega.parallel.comm import world
from raymega.plan.run_plan import RunPlan
from raymega.train.environment import prepare_process
from tests.cuda_books import answers
from tests.cuda_books.build import build_device
from tests.cuda_books.process import keep_book as keep
from tests.cuda_books.process import start_server
from tests.cuda_books.rank import start
from tests.cuda_books.roofline.__main__ import BUDGETS
from tests.cuda_books.roofline.jobs import CASES, busiest_rank, plan_of

STEPS, PROFILE = "RAYMEGA_HOST_STEPS", "RAYMEGA_HOST_PROFILE"
"""Environment variables that the command hands to the process of a case."""


def keep_book(name: str, folder: Path) -> dict[str, Any]:
    """Return the milliseconds of a layer and micro-batch; the body of a case's process."""
    plan = plan_of(name)
    answers.put_in(plan)
    device = prepare_process(plan, device="cuda", local_rank=0)
    num_layers = plan.job.model.num_layers
    more, less = (
        _step_s(plan_of(name, num_layers=n), device) for n in (num_layers, num_layers // 2)
    )
    added = num_layers // 2 // plan.grid.pp * plan.batch.num_micro_batches
    return {"layout": name, "figures": {"host_ms_a_layer": round(1e3 * (more - less) / added, 3)}}


def _step_s(plan: RunPlan, device: torch.device) -> float:
    """Return the least CPU seconds of a step: what other processes do only adds."""
    rank, found = start(plan, busiest_rank(plan), device), []
    profile = cProfile.Profile() if os.environ[PROFILE] else None
    for _ in range(int(os.environ[STEPS])):
        begin_s = time.process_time()
        rank.step()
        found.append(time.process_time() - begin_s)
    if profile:
        profile.runcall(rank.step)
        profile.dump_stats(os.environ[PROFILE])
    del rank
    world.abort_world()
    gc.collect()
    return min(found)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books.roofline.host")
    parser.add_argument("--build", type=Path, default=Path("build/cuda-books"))
    parser.add_argument("--case", action="append")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--profile", default="", help="file for cProfile's figures of the last step"
    )
    options = parser.parse_args()
    variables = {STEPS: str(options.steps), PROFILE: options.profile}
    start_server(build_device(options.build.absolute()) | variables)
    budgets = json.loads(BUDGETS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in options.case or list(CASES):
            book = keep(name, "", Path(folder), module="tests.cuda_books.roofline.host")
            if "error" in book:
                sys.exit(f"{name}: it failed: {book['error']}")
            plan = plan_of(name)
            passes = plan.job.model.num_layers // plan.grid.pp * plan.batch.num_micro_batches
            device_ms = budgets.get(name, {}).get("step_ms", 0.0) / passes
            print(
                json.dumps(
                    {"case": name, **book["figures"], "device_ms_a_layer": round(device_ms, 3)}
                )
            )


if __name__ == "__main__":
    main()
