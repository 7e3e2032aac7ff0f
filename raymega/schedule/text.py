"""A schedule as lines of text: who does what in which unit of time.

It owns the layout for terminals and docstrings; the picture is draw's.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymega.schedule.instructions import Op, Schedule
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.timeline import Event

LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B"}
IDLE = "."


def timetable(schedules: Sequence[Schedule], *, max_units: int = 30) -> str:
    """One line a stage and one column a unit of time: a forward takes one, a backward two.

    ``F2`` is the forward of micro-batch 2 and ``.`` is idle time; after ``max_units`` columns the
    lines end in ``...``.
    """
    simulation = simulate(schedules, Durations(forward=1.0, backward=2.0, transfer=0.0))
    num_units = round(simulation.time)
    rows = [_cells(events, num_units) for events in simulation.events]
    width = max((len(cell) for row in rows for cell in row), default=0)
    label_width = len(str(len(rows) - 1))
    lines = []
    for stage, row in enumerate(rows):
        shown = [cell.ljust(width) for cell in row[:max_units]]
        shown += ["..."] if num_units > max_units else []
        lines.append(f"stage {stage:{label_width}d}  {' '.join(shown)}".rstrip())
    return "\n".join(lines)


def _cells(events: Sequence[Event], num_units: int) -> list[str]:
    cells = [IDLE] * num_units
    for event in events:
        if event.name in LETTERS:
            units = slice(round(event.start_s), round(event.end_s))
            size = units.stop - units.start
            cells[units] = [f"{LETTERS[Op(event.name)]}{event.micro_batch}"] * size
    return cells
