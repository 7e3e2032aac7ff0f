"""Trace one rank of each job of the roofline on the device that executes nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from raymega.parallel.comm import world
from raymega.plan.flops import flops_per_token
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import RunPlan
from raymega.planner.cost.simulated_step import played_step
from raymega.train.environment import prepare_process
from tests.cuda_books import answers
from tests.cuda_books.books import Books
from tests.cuda_books.rank import start
from tests.cuda_books.roofline.cost_notes import noting_costs
from tests.cuda_books.roofline.jobs import busiest_rank, plan_of
from tests.cuda_books.roofline.rates import PEAK_FLOPS
from tests.cuda_books.roofline.replay import Entry, read_costs, replay, totals_of

DEVICE = "h100"
LEAST_S = 5e-5
"""Seconds from which a part is listed."""


def keep_book(name: str, folder: Path) -> dict[str, Any]:
    """Trace a step of the case's busiest rank, and one with half the layers; return its figures."""
    plan = plan_of(name)
    answers.put_in(plan)
    prepare = prepare_process(plan, device="cuda", local_rank=0)
    whole = _trace(plan, prepare, folder / "step.tsv")
    half_plan = plan_of(name, num_layers=plan.job.model.num_layers // 2)
    half = _trace(half_plan, prepare, folder / "half.tsv")
    return {"layout": name, "figures": figures_of(plan, whole, half)}


def _trace(plan: RunPlan, device: Any, trace: Path) -> list[Entry]:
    """Run a step of the plan with notes of its costs, close the world, and return the trace."""
    books = Books()
    rank = start(plan, busiest_rank(plan), device)
    with books.counting(trace), noting_costs(books):
        rank.step()
    del rank
    world.abort_world()
    gc.collect()
    with trace.open() as lines:
        return read_costs(lines, tp=plan.grid.tp)


def figures_of(plan: RunPlan, whole: list[Entry], half: list[Entry]) -> dict[str, float]:
    """Return a step's milliseconds by part, its MFU, and what one layer adds for one micro-batch."""
    parts = replay(whole)
    # the pipeline's waiting depends on the order alone: its share is that of the planned step
    planned = played_step(plan, CATALOGUE[DEVICE])
    passes = planned.pipeline_s - planned.bubble_s
    parts["bubble"] = planned.bubble_s / passes * (parts.total() - parts["update"])
    step_s = parts.total()
    tokens = plan.batch.global_batch_size * plan.job.data.seq_len
    flops = tokens * flops_per_token(plan.job.model, seq_len=plan.job.data.seq_len)
    mfu = flops / (plan.grid.world_size * PEAK_FLOPS)
    added = plan.job.model.num_layers // 2 // plan.grid.pp * plan.batch.num_micro_batches
    more, less = (totals_of(entries, phase="passes") for entries in (whole, half))
    a_layer = {kind: (more[kind] - less[kind]) / added for kind in ("launches", "element_bytes")}
    return {
        "step_ms": round(1e3 * step_s, 1),
        "mfu_percent": round(100 * mfu / step_s, 2),
        "plan_ms": round(1e3 * planned.total_s, 1),
        "plan_mfu_percent": round(100 * mfu / planned.total_s, 2),
        "launches_a_layer": round(a_layer["launches"], 3),
        "element_gb_a_layer": round(a_layer["element_bytes"] / 1e9, 3),
        **{
            f"ms.{part}": round(1e3 * parts[part], 1)
            for part in sorted(parts)
            if parts[part] >= LEAST_S
        },
    }
