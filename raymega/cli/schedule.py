"""Command `raymega schedule`: prints, checks, simulates and draws a pipeline schedule."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import AsJson
from raymega.cli.output import json_object, print_json, write_drawing
from raymega.errors import ConfigError
from raymega.schedule.checker import CheckResult, check
from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, Simulation, simulate
from raymega.schedule.stage_placement import Program
from raymega.schedule.table import SCHEDULES, make_schedule
from raymega.schedule.text import timetable
from raymega.schedule.timeline_svg import draw_svg


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(SCHEDULES)}.")],
    pp: int,
    micro_batches: int,
    chunks: int = 0,
    microbatch_group_size_per_vp_stage: Annotated[int, typer.Option("--group-size")] = 0,
    max_in_flight_microbatches: Annotated[int, typer.Option("--max-activations")] = 0,
    wgrad_activation_fraction: Annotated[float, typer.Option("--owed-share")] = 1.0,
    times: str = "",
    as_json: AsJson = False,
    draw: Annotated[Path | None, typer.Option(metavar="FILE.svg")] = None,
) -> None:
    """Show bubble, peak activations and timeline of a pipeline schedule (forward 1, backward 2 units).

    Options:
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches per step.
        chunks: Model chunks per rank; 0 is the schedule's minimum.
        microbatch_group_size_per_vp_stage: For interleaved: micro-batches per group; 0 is pp.
        max_in_flight_microbatches: For zb_auto: maximum number of micro-batches in flight on a rank; 0 is pp.
        wgrad_activation_fraction: For zb_auto: share of a micro-batch's activations that is kept for its
            weight gradient.
        times: Durations in units: --times forward=1,backward=2,weight=1,transfer=0,handling=0
        draw: Write the timeline to this file.

    Example: raymega schedule zb_v --pp 4 --micro-batches 8 --draw timeline.svg
    """
    name = name.lower().replace("-", "_")
    if chunks == 0:  # make_schedule refuses an unknown name
        chunks = SCHEDULES[name].least_chunks if name in SCHEDULES else 1
    # build, check and simulate the schedule
    durations = _durations(times)
    sizes = Sizes(
        pp=pp,
        num_micro_batches=micro_batches,
        chunks=chunks,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        max_in_flight_microbatches=max_in_flight_microbatches,
        wgrad_activation_fraction=wgrad_activation_fraction,
        times=durations,
    )
    program = make_schedule(name, sizes)
    checked = check(program, num_micro_batches=micro_batches)
    simulation = simulate(program, durations)
    title = f"{name}: ranks {pp}, micro-batches {micro_batches}"
    title += f", chunks {chunks}" if chunks > 1 else ""
    # output
    if draw is not None:
        _write_picture(draw, simulation, title)
    if as_json:
        # The sizes' field `times` is the option --times; the JSON calls it durations.
        numbers = {"schedule": name, **json_object(sizes)}
        numbers["durations"] = numbers.pop("times")
        print_json(numbers | _results(checked, simulation))
        return
    _show(title, program, checked, simulation)
    if draw is not None:
        print(f"timeline written to {draw}")


def _durations(times: str) -> Durations:
    """Return the durations of ``a=1,b=2``, with defaults for the others."""
    known = {field.name for field in fields(Durations)}
    values: dict[str, float] = {}
    for pair in filter(None, times.split(",")):
        name, _, number = pair.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            # Not a number: refuse the pair below.
            known = set()
        if name.strip() not in known or not 0 <= values[name.strip()] < inf:
            raise ConfigError(
                fact=f"--times {pair}",
                rule="it must be NAME=NUMBER with a number of at least 0 and a name of "
                + ", ".join(field.name for field in fields(Durations)),
                remedy="use --times forward=1,backward=2,weight=1",
            )
    durations = Durations(**values)
    if durations.weight > durations.backward:
        raise ConfigError(
            fact=f"--times weight={durations.weight:g}",
            rule=f"it must be at most backward={durations.backward:g}, of which it is a part",
            remedy="set backward to the sum of both parts",
        )
    return durations


def _results(checked: CheckResult, simulation: Simulation) -> dict[str, object]:
    """Return the figures, and the timeline of each rank, which is also its list of instructions."""
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


def _show(title: str, program: Program, checked: CheckResult, simulation: Simulation) -> None:
    print(f"{title}; checked: no deadlock, each forward and backward once")
    print(
        f"bubble {simulation.bubble:.3f} of ideal time, {simulation.bubble_rate:.1%} of total time"
    )
    unit = "micro-batches on a chunk" if program.placement.chunks > 1 else "micro-batches"
    print(f"peak activations by rank, in {unit}: {checked.peak_activations}")
    print(timetable(program))


def _write_picture(path: Path, simulation: Simulation, title: str) -> None:
    rows = {f"rank {rank}": events for rank, events in enumerate(simulation.events)}
    picture = draw_svg(rows, title=title, time_unit="forward passes")
    write_drawing(
        path,
        picture,
        rule="it must name a file that can be written",
        remedy="use a file in an existing folder that you can write to",
    )
