"""`raymega schedule`: prints, checks and draws a pipeline schedule, without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raymega.errors import ConfigError, Fault
from raymega.schedule.checker import CheckResult, check
from raymega.schedule.draw import draw_svg
from raymega.schedule.instructions import Schedule
from raymega.schedule.simulate import Durations, Simulation, simulate
from raymega.schedule.table import make_schedule
from raymega.schedule.text import timetable


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1f1b or gpipe.")],
    pp: Annotated[int, typer.Option("--pp", help="Pipeline stages.")],
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Micro-batches of a step.")],
    chunks: Annotated[int, typer.Option("--chunks", help="Model chunks per rank.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    draw: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE.svg", help="Write the time line here.")
    ] = None,
) -> None:
    """Show a schedule's bubble, peak activations and time line (forward 1, backward 2 units).

    Example: raymega schedule 1f1b --pp 4 --micro-batches 8 --draw timeline.svg
    """
    lists = make_schedule(name, pp=pp, num_micro_batches=micro_batches, chunks=chunks)
    checked = check(lists, num_micro_batches=micro_batches)
    simulation = simulate(lists, Durations(forward=1.0, backward=2.0, transfer=0.0))
    title = f"{name}: stages {pp}, micro-batches {micro_batches}"
    if draw is not None:
        _write_picture(draw, simulation, title)
    if as_json:
        numbers = {"schedule": name, "pp": pp, "chunks": chunks, "num_micro_batches": micro_batches}
        print(json.dumps(numbers | _results(checked, simulation)))
        return
    _show(title, lists, checked, simulation)
    if draw is not None:
        print(f"time line drawn in {draw}")


def _results(checked: CheckResult, simulation: Simulation) -> dict[str, object]:
    """Measures, and the time line by stage, which is also the list of instructions."""
    return {
        "bubble": simulation.bubble,
        "bubble_rate": simulation.bubble_rate,
        "time": simulation.time,
        "peak_activations": checked.peak_activations,
        "timeline": [
            [
                {
                    "op": event.name,
                    "micro_batch": event.micro_batch,
                    "chunk": event.chunk,
                    "start": event.start_s,
                    "end": event.end_s,
                }
                for event in events
            ]
            for events in simulation.events
        ],
    }


def _show(
    title: str, lists: tuple[Schedule, ...], checked: CheckResult, simulation: Simulation
) -> None:
    print(f"{title}; checked: no deadlock, each forward and backward once")
    print(f"bubble {simulation.bubble:.3f} of ideal time, {simulation.bubble_rate:.1%} of all time")
    print(f"peak activations by stage, in micro-batches: {checked.peak_activations}")
    print(timetable(lists))


def _write_picture(path: Path, simulation: Simulation, title: str) -> None:
    rows = {f"stage {stage}": events for stage, events in enumerate(simulation.events)}
    picture = draw_svg(rows, title=title, time_unit="forward passes")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            Fault(
                fact=f"--draw {path}: {error.strerror}",
                rule="it must name a file that can be written",
                remedy="choose a file in an existing folder of yours",
            )
        ) from None
