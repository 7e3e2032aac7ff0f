"""Prints a schedule as lines of text: the work of each rank in each unit of time.

It owns the layout for terminals and docstrings. `raymega.schedule.timeline_svg` draws pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymega.schedule.instructions import Op
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Program
from raymega.schedule.timeline import Event

LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
IDLE = "."


def timetable(program: Program, *, max_units: int = 30) -> str:
    """Return one line per rank and one column per time unit; a forward takes one, a backward two.

    ``F2`` is the forward of micro-batch 2, ``F2.1`` on chunk 1, ``.`` is idle time. Of a split
    backward ``B`` is the input part and ``W`` the weight part, one unit each. After ``max_units``
    columns the lines end in ``...``.
    """
    simulation = simulate(program, Durations())
    num_units = round(simulation.time)
    with_chunk = program.placement.chunks > 1
    rows = [_cells(events, num_units, with_chunk=with_chunk) for events in simulation.events]
    width = max((len(cell) for row in rows for cell in row), default=0)
    label_width = len(str(len(rows) - 1))
    # Pad the cells to one width, so that columns align.
    lines = []
    for rank, row in enumerate(rows):
        shown = [cell.ljust(width) for cell in row[:max_units]]
        shown += ["..."] if num_units > max_units else []
        lines.append(f"rank {rank:{label_width}d}  {' '.join(shown)}".rstrip())
    return "\n".join(lines)


def _cells(events: Sequence[Event], num_units: int, *, with_chunk: bool) -> list[str]:
    cells = [IDLE] * num_units
    for event in events:
        if event.name in LETTERS:
            units = slice(round(event.start_s), round(event.end_s))
            chunk = f".{event.chunk}" if with_chunk else ""
            cell = f"{LETTERS[Op(event.name)]}{event.micro_batch}{chunk}"
            cells[units] = [cell] * (units.stop - units.start)
    return cells
