"""Command `raymega plan`: plans a job, predicts its speed and searches layouts, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import Grid, Overrides
from raymega.cli.output import print_json
from raymega.cli.plan import predictions
from raymega.cli.plan.bill import MOST_DOLLARS, Price, priced
from raymega.cli.plan.text import show_plan
from raymega.config.grid_text import grid_overrides
from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.search.auto_parallel import BY_DEVICE
from raymega.planner.search.search import search

_NO_JOB = Fault(
    fact="raymega plan without a job file",
    rule="it takes a job file, --runs RUNS.csv or --calibrate RUN",
    remedy="use raymega plan jobs/verify.yaml",
)
_NO_SEARCH = Fault(
    fact="--gpus without --top",
    rule="a job's own layout takes as many GPUs as its grid has ranks",
    remedy="add --top 5 to search layouts on that many GPUs, or set the degrees with --grid",
)
_NO_PICTURE = Fault(
    fact="--draw with --top",
    rule="it draws the job's own layout, and --top shows others",
    remedy="leave --top out, and set the layout to draw: --top prints its --set texts",
)
_NO_PREDICTION = Fault(
    fact="--straggler or --interruptions without --gpu",
    rule="they change a prediction, and without a device there is none",
    remedy="add --gpu h100",
)
_NO_SPOT = Fault(
    fact="--interruptions without a price of spot nodes",
    rule="they change the cost of a run on nodes that may be taken away, and of no other",
    remedy="add --spot-price 1.1, in dollars for an hour of one GPU",
)
_NO_BILL = Fault(
    fact="--price, --spot-price or --interruptions with --top",
    rule="a search compares steps, and the bill is of the job's own layout",
    remedy="leave --top out, and set the layout to price: --top prints its --set texts",
)
_TWO_COMPARISONS = Fault(
    fact="--runs with --calibrate",
    rule="the first compares published runs with predictions, the second fits constants to a run of yours",
    remedy="give one of them",
)
_TWO_SUBJECTS = Fault(
    fact="raymega plan with both a job file and --runs or --calibrate",
    rule="it plans a job, or compares runs with predictions",
    remedy="give one of them",
)
_GPU = f"Predict time and memory on a GPU: {', '.join(CATALOGUE)}, or a YAML file."


def plan(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml")] = None,
    overrides: Overrides = None,
    grid: Grid = "",
    gpu: Annotated[str, typer.Option(help=_GPU)] = "",
    gpus: Annotated[int, typer.Option(min=0)] = 0,
    top: Annotated[int, typer.Option(min=0)] = 0,
    straggler: Annotated[float, typer.Option(min=1.0, max=1e6)] = 1.0,
    price: Price = 0.0,
    spot_price: Annotated[float, typer.Option(min=0, max=MOST_DOLLARS)] = 0.0,
    interruptions: Annotated[float, typer.Option(min=0, max=1e6)] = 0.0,
    draw: Annotated[Path | None, typer.Option(metavar="FILE.html")] = None,
    runs: Path | None = None,
    calibrate: Annotated[Path | None, typer.Option(metavar="RUN")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show a job's grid, stages, batch, schedule, parameters, state bytes and activations.

    Options:
        job_file: Job file.
        gpus: With --top: number of GPUs to search layouts for; 0 is the job's number of ranks.
        top: Show this many of the fastest layouts that fit; without --gpu, on h100 or cpu.
        straggler: Predict with one device that is this many times slower.
        spot_price: Dollars for an hour of one GPU on nodes that may be taken away.
        interruptions: Expected number of times that such a node is taken away in a day; 0 is 0.5.
        draw: Draw memory and timeline as HTML; without --gpu, on h100 or cpu.
        runs: Compare predictions with a table of published runs (.csv).
        calibrate: Compare predictions with a finished run, given by its folder, and fit the constants to it.
        as_json: Print one JSON object; with --runs one per line.

    Example: raymega plan jobs/verify.yaml --grid tp=2,pp=2
    Example: raymega plan jobs/llama-7b-16gpu.yaml --gpu h100 --top 5
    Example: raymega plan jobs/llama-7b-16gpu.yaml --gpu h100 --price 2.5 --spot-price 1.1
    Example: raymega plan --calibrate my-out/runs/my-run --gpu h100
    Example: raymega plan jobs/llama-70b-512gpu.yaml --gpu h100 --draw plan.html
    """
    has_device = bool(gpu or top or draw or price or spot_price)
    is_wrong = {
        _NO_JOB: job_file is None and runs is None and calibrate is None,
        _TWO_SUBJECTS: job_file is not None and (runs or calibrate) is not None,
        _NO_SEARCH: gpus > 0 and not top,
        _NO_PICTURE: bool(draw and top),
        _NO_BILL: bool(top and (price or spot_price or interruptions)),
        _TWO_COMPARISONS: runs is not None and calibrate is not None,
        _NO_PREDICTION: (straggler > 1 or interruptions > 0) and not has_device,
    }
    faults = [fault for fault, holds in is_wrong.items() if holds]
    if runs is not None or calibrate is not None:
        given = {
            "--set": overrides, "--grid": grid, "--gpu": gpu if calibrate is None else "", "--top": top,
            "--straggler": straggler > 1, "--price": price, "--spot-price": spot_price,
            "--interruptions": interruptions, "--draw": draw,
        }  # fmt: skip
        faults += _idle_faults("--runs" if calibrate is None else "--calibrate", given)
    raise_faults(ConfigError, faults)
    # comparisons with measured runs need no job
    if runs is not None:
        predictions.show_runs(runs, as_json=as_json)
        return
    if calibrate is not None:
        _show_calibration(calibrate, gpu, as_json=as_json)
        return
    assert job_file is not None
    # plan of the job, with the degrees of --grid
    job, choice = api.load_chosen(job_file, [*(overrides or ()), *grid_overrides(grid)])
    made = api.plan(job)
    if not as_json:
        predictions.show_choice(choice)
    # search
    name = gpu or (_device_of(job) if top or draw or price or spot_price else "")
    device = priced(_slowed(name, straggler), price, spot_price, interruptions) if name else None
    if device and interruptions and not device.spot_price_per_hour:
        raise ConfigError(_NO_SPOT)
    if device and top:
        _show_best(made, device, gpus or made.grid.world_size, top=top, as_json=as_json)
        return
    # the plan itself, with a prediction if a GPU or a price is given
    show_plan(made, as_json=as_json, device=device if gpu or price or spot_price else None)
    if device and draw is not None:
        predictions.write_picture(made, device, draw)


def _idle_faults(subject: str, given: Mapping[str, object]) -> Iterator[Fault]:
    """Yield the fault of options that a comparison with measured runs does not read."""
    idle = [name for name, value in given.items() if value]
    if idle:
        yield Fault(
            fact=f"{', '.join(idle)} with {subject}",
            rule="layouts, devices and times are those that were measured, so it has no effect",
            remedy=f"leave {' and '.join(idle)} out",
        )


def _slowed(gpu: str, straggler: float) -> Accelerator:
    """Return the accelerator ``gpu``, with ``--straggler`` where given, else the file's own factor."""
    device = find_accelerator(gpu)
    return replace(device, straggler=straggler) if straggler > 1 else device


def _device_of(job: Job) -> str:
    """Return the default of ``--gpu``: the job's accelerator, else ``cpu`` or ``h100`` by its device."""
    if job.cluster.accelerator != BY_DEVICE:
        return job.cluster.accelerator
    return "cpu" if job.cluster.device == "cpu" else "h100"


def _show_calibration(run: Path, gpu: str, *, as_json: bool) -> None:
    """Compare with a run of raymega; what fits constants loads numpy, and no other plan needs it."""
    from raymega.cli.plan.measured import show_calibration

    show_calibration(run, gpu, as_json=as_json)


def _show_best(
    plan: RunPlan, device: Accelerator, num_devices: int, *, top: int, as_json: bool
) -> None:
    result = search(plan.job, device, num_devices=num_devices, top=top)
    if as_json:
        best = [
            {**predictions.prediction_object(found, device), "set": found.overrides(plan.job)}
            for found in result.best
        ]
        missed = predictions.prediction_object(result.missed, device) if result.missed else None
        print_json({"best": best, "missed": missed, "refused": result.refused})
        return
    predictions.show_search(result, device, plan.job)
