"""Draw a plan as one HTML page: the memory of each pipeline rank, and the time line of a step.

The page shows predicted memory, predicted time and the simulated schedule. It needs no server, no
script and no other file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.state_bytes import state_of
from raymega.plan.run_plan import RunPlan
from raymega.planner.bill import bill_lines, make_bill
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.planner.cost.simulated_step import play
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
    "activations": "#e69f00",
    "reserved": "#bbbbbb",
}
PARTS = {
    "compute": "#56b4e9", "tensor parallel": "#0072b2", "messages": "#009e73", "bubble": "#dddddd",
    "data parallel": "#d55e00", "optimizer": "#e69f00", "sharing": "#cc79a7",
    "experts": "#009e9e", "straggler": "#882255",
}  # fmt: skip
DRAWN_ROUNDS = 3
"""Micro-batches in the time line, in multiples of the pipeline depth; more would look the same."""
MOST_PASSES = 6000
"""Most blocks in the time line, over all ranks."""
LEFT_PX, ROW_PX, GAP_PX, WIDTH_PX, TOP_PX = 90, 24, 6, 760, 50
STYLE = """
body { font: 14px Helvetica, Arial, sans-serif; color: #222; margin: 24px; max-width: 1200px }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 28px }
table { border-collapse: collapse } td, th { text-align: left; padding: 2px 14px 2px 0 }
svg { max-width: 100%; height: auto } .wide { overflow-x: auto } .wide svg { max-width: none } .note { color: #555 }
"""


def draw_plan(found: RankedLayout, device: Accelerator) -> str:
    """Return the HTML page of a plan."""
    plan, time = found.plan, found.time
    facts = {
        "job": plan.job.run.name,
        "layout": describe(found),
        "on": f"{plan.grid.world_size} x {device.name}",
        "a step": f"{seconds(time.total_s)}, {found.tokens_per_s:,.0f} tokens/s a device",
        "the whole run": " ".join(
            bill_lines(make_bill(found.plan, device, found.time.total_s), device)
        ),
        "what binds": advice_line(advise(found, device), found, device),
        "how far to trust it": expected_error(device),
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    title = escape(f"{plan.job.run.name} on {plan.grid.world_size} x {device.name}, as planned")
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1><table>{rows}</table>",
            "<h2>Memory of each pipeline rank</h2>",
            memory_svg(plan, device),
            "<h2>Where a step's time goes</h2>",
            time_svg(found),
            "<h2>Time line of the pipeline</h2>",
            f'<p class="note">{escape(_timeline_note(plan))}</p>',
            f'<div class="wide">{_timeline(plan, device)}</div>',
            "</body></html>\n",
        )
    )


def memory_svg(plan: RunPlan, device: Accelerator) -> str:
    """Return a bar for each pipeline rank, cut into parts, and a line at the device's memory."""
    bars = {f"pp {rank}": parts for rank, parts in enumerate(_memory_parts(plan))}
    limit = device.memory_bytes / GIB
    widest = max(limit, *(sum(parts.values()) for parts in bars.values()))
    # Room for the sum at the end of the longest bar.
    scale = WIDTH_PX / widest / 1.08
    height = TOP_PX + len(bars) * (ROW_PX + GAP_PX) + 26
    end = LEFT_PX + limit * scale
    lines = [
        *_legend(FILLS),
        *_bars(bars, scale, FILLS, "GiB"),
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{TOP_PX - 8}" y2="{height - 22}" '
        'stroke="#d00" stroke-width="2" stroke-dasharray="5 3"/>',
        _text(end, height - 6, f"{device.name}: {limit:.0f} GiB", anchor="middle"),
    ]
    return _svg(lines, height)


def time_svg(found: RankedLayout) -> str:
    """Return one bar with the parts of the step's time."""
    parts = {name: value for name, value in found.time.parts.items() if value}
    scale = WIDTH_PX / found.time.total_s / 1.08
    bars = {"step": parts}
    fills = {name: fill for name, fill in PARTS.items() if name in parts}
    return _svg([*_legend(fills), *_bars(bars, scale, fills, "s")], TOP_PX + ROW_PX + 12)


def _memory_parts(plan: RunPlan) -> Iterator[dict[str, float]]:
    """Yield the GiB of each part, for each rank of the pipeline."""
    for use, held in pipeline_memory(plan):
        state = state_of(plan.job, held, plan.grid)
        parts = {
            "weights": state.weight_bytes, "gradients": state.gradient_bytes,
            "masters": state.master_bytes, "moments": state.moment_bytes,
            "fixed": state.fixed_bytes, "gathered": state.passing_bytes,
            "activations": use.activation_bytes + use.state_bytes - state.total_bytes,
            "reserved": use.reserved_bytes,
        }  # fmt: skip
        yield {name: value / GIB for name, value in parts.items()}


def _timeline(plan: RunPlan, device: Accelerator) -> str:
    # Milliseconds, one row for each pipeline rank.
    played = play(plan, device, num_micro_batches=_drawn(plan))
    rows = {f"pp {rank}": events for rank, events in enumerate(played.events)}
    return draw_svg(rows, title=plan.job.schedule.name, time_unit="ms", scale=1000.0)


def _drawn(plan: RunPlan) -> int:
    """Return the number of micro-batches in the time line."""
    pp = plan.grid.pp
    most = MOST_PASSES // (2 * pp * plan.placement.chunks)
    drawn = min(plan.batch.num_micro_batches, DRAWN_ROUNDS * pp, max(most, pp))
    # Interleaved schedules need whole rounds of pp micro-batches.
    return max(drawn - drawn % pp, min(drawn, pp))


def _timeline_note(plan: RunPlan) -> str:
    drawn, whole = _drawn(plan), plan.batch.num_micro_batches
    part = (
        f"{drawn} of the step's {whole} micro-batches, and their bubble"
        if drawn < whole
        else (f"all {whole} micro-batches")
    )
    return (
        f"{part}; a row a pipeline rank; passes as long as predicted, traffic of their layers in them. "
        "The update and what data-parallel ranks send each other come after it."
    )


def _bars(
    bars: Mapping[str, Mapping[str, float]], scale: float, fills: Mapping[str, str], unit: str
) -> Iterator[str]:
    for row, (label, parts) in enumerate(bars.items()):
        y, x = TOP_PX + row * (ROW_PX + GAP_PX), float(LEFT_PX)
        yield _text(LEFT_PX - 8, y + 16, label, anchor="end")
        for name, value in parts.items():
            width = value * scale
            hint = f"{label}, {name}: {value:.3g} {unit}"
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW_PX}" '
                f'fill="{fills[name]}"><title>{escape(hint)}</title></rect>'
            )
            if width > 44:
                yield _text(x + width / 2, y + 16, f"{value:.3g}", anchor="middle")
            x += width
        yield _text(x + 6, y + 16, f"{sum(parts.values()):.3g} {unit}")


def _legend(fills: Mapping[str, str]) -> Iterator[str]:
    x = float(LEFT_PX)
    for name, fill in fills.items():
        yield f'<rect x="{x:.1f}" y="10" width="14" height="14" fill="{fill}"/>'
        yield _text(x + 19, 22, name)
        x += 40 + 7.0 * len(name)


def _text(x: float, y: float, content: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _svg(lines: Sequence[str], height: float) -> str:
    width = LEFT_PX + WIDTH_PX + 70
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    return "\n".join((head, *lines, "</svg>"))
