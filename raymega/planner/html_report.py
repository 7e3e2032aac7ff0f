"""Draw a plan as one HTML page: the memory of each pipeline rank, and the time line of a step.

The page shows predicted memory, predicted time and the simulated schedule. It needs no server, no
script and no other file.
"""

from __future__ import annotations

from collections.abc import Iterator

from raymega.drawing.bars import Bars, draw_bars
from raymega.drawing.page import charts, note, page, table, zoomable
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.state_bytes import state_of
from raymega.plan.run_plan import RunPlan
from raymega.planner.bill import Bill, bill_lines
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.planner.cost.simulated_step import play
from raymega.planner.cost.teacher_memory import teacher_memory
from raymega.planner.search.advice import advice_line, advise
from raymega.planner.search.search import RankedLayout
from raymega.planner.search.selection import describe, seconds
from raymega.schedule.timeline_svg import draw_svg

GIB = 2**30
# Okabe and Ito's palette, which people with any colour vision can tell apart.
FILLS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "masters": "#009e73",
    "moments": "#8fd3bd",
    "fixed": "#999999",
    "gathered": "#f0e442",
    "teacher": "#cc79a7",
    "activations": "#e69f00",
    "reserved": "#bbbbbb",
}
PARTS = {
    "compute": "#56b4e9", "tensor parallel": "#0072b2", "messages": "#009e73", "bubble": "#dddddd",
    "data parallel": "#d55e00", "optimizer": "#e69f00", "sharing": "#cc79a7",
    "experts": "#009e9e", "straggler": "#882255", "reference": "#ddcc77",
}  # fmt: skip
DRAWN_ROUNDS = 3
"""Micro-batches in the time line, in multiples of the pipeline depth; more would look the same."""
MOST_PASSES = 6000
"""Most blocks in the time line, over all ranks."""
TIMELINE_PX = 1090
"""Width of the time line's rows, which the page just holds."""


def draw_plan(found: RankedLayout, device: Accelerator, bill: Bill) -> str:
    """Return the HTML page of a plan, with the bill of its run."""
    plan, time = found.plan, found.time
    facts = {
        "job": plan.job.run.name,
        "layout": describe(found),
        "on": f"{plan.grid.world_size} x {device.name}",
        "a step": f"{seconds(time.total_s)}, {found.tokens_per_s:,.0f} tokens/s a device",
        "the whole run": " ".join(bill_lines(bill, device)),
        "what binds": advice_line(advise(found, device), found, device),
        "how far to trust it": expected_error(device, plan.job),
    }
    return page(
        f"{plan.job.run.name} on {plan.grid.world_size} x {device.name}, as planned",
        (
            table(("", ""), facts.items()),
            charts([memory_svg(plan, device), time_svg(found)]),
            "<h2>Time line of the pipeline</h2>",
            note(_timeline_note(found)),
            zoomable(_timeline(plan, device)),
        ),
    )


def memory_svg(plan: RunPlan, device: Accelerator) -> str:
    """Return a bar for each pipeline rank, cut into parts, and a line at the device's memory."""
    limit = device.memory_bytes / GIB
    return draw_bars(
        Bars(
            title="Memory of each pipeline rank",
            unit="GiB",
            rows={f"pp {rank}": parts for rank, parts in enumerate(memory_parts(plan))},
            fills=FILLS,
            limit=(f"{device.name}: {limit:.0f} GiB", limit),
        )
    )


def time_svg(found: RankedLayout) -> str:
    """Return one bar with the parts of the step's time."""
    parts = {name: value for name, value in found.time.parts.items() if value}
    return draw_bars(
        Bars(
            title="Where a step's time goes",
            unit="s",
            rows={"step": parts},
            fills=PARTS,
        )
    )


def memory_parts(plan: RunPlan) -> Iterator[dict[str, float]]:
    """Yield the GiB of each part, for each rank of the pipeline."""
    for use, held in pipeline_memory(plan):
        state = state_of(plan.job, held, plan.grid)
        teacher = teacher_memory(plan, use.pp_rank).state_bytes
        parts = {
            "weights": state.weight_bytes, "gradients": state.gradient_bytes,
            "masters": state.master_bytes, "moments": state.moment_bytes,
            "fixed": state.fixed_bytes, "gathered": state.passing_bytes,
            "teacher": teacher,
            "activations": use.activation_bytes + use.state_bytes - state.total_bytes - teacher,
            "reserved": use.reserved_bytes,
        }  # fmt: skip
        yield {name: value / GIB for name, value in parts.items()}


def _timeline(plan: RunPlan, device: Accelerator) -> str:
    # Milliseconds, one row for each pipeline rank.
    played = play(plan, device, num_micro_batches=_drawn(plan))
    rows = {f"pp {rank}": events for rank, events in enumerate(played.events)}
    return draw_svg(
        rows, title=plan.job.schedule.name, time_unit="ms", scale=1000.0, width_px=TIMELINE_PX
    )


def _drawn(plan: RunPlan) -> int:
    """Return the number of micro-batches in the time line."""
    pp = plan.grid.pp
    most = MOST_PASSES // (2 * pp * plan.placement.chunks)
    drawn = min(plan.batch.num_micro_batches, DRAWN_ROUNDS * pp, max(most, pp))
    # Interleaved schedules need whole rounds of pp micro-batches.
    return max(drawn - drawn % pp, min(drawn, pp))


def _timeline_note(found: RankedLayout) -> str:
    plan, whole = found.plan, found.plan.batch.num_micro_batches
    drawn = _drawn(plan)
    share = found.time.parts.get("bubble", 0.0) / found.time.total_s
    part = (
        f"{drawn} of the step's {whole} micro-batches, whose bubble is larger than the whole step's "
        f"{share:.1%}"
        if drawn < whole
        else f"all {whole} micro-batches"
    )
    return (
        f"{part}; a row a pipeline rank; passes as long as predicted, traffic of their layers in them. "
        "The update and what data-parallel ranks send each other come after it."
    )
