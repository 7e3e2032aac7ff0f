"""`raymega plan`: shows what a job will do, without starting anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raymega import api
from raymega.cli.options import Overrides
from raymega.cli.output import print_json
from raymega.cli.plan import predictions
from raymega.cli.plan.measured import show_calibration
from raymega.cli.plan.text import show_plan
from raymega.config.schema import Job
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.search.auto_parallel import BY_DEVICE
from raymega.planner.search.search import search

_NO_JOB = Fault(
    fact="raymega plan without a job file",
    rule="it plans a job, or compares published runs with --runs RUNS.csv, or a run with --calibrate RUN",
    remedy="give a job file; jobs/verify.yaml is one that runs as it is",
)
_NO_SEARCH = Fault(
    fact="--gpus without --top",
    rule="a job's own layout takes as many GPUs as its grid has ranks",
    remedy="add --top 5 for layouts on so many GPUs, or set the degrees by --grid",
)
_TWO_SUBJECTS = Fault(
    fact="raymega plan with both a job file and --runs or --calibrate",
    rule="it plans a job, or compares runs with predictions",
    remedy="give one of them",
)
_GPU = f"Predict time and memory on {', '.join(CATALOGUE)}, or a YAML file's."


def plan(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml")] = None,
    overrides: Overrides = None,
    grid: str = "",
    gpu: Annotated[str, typer.Option(help=_GPU)] = "",
    gpus: Annotated[int, typer.Option(min=0)] = 0,
    top: Annotated[int, typer.Option(min=0)] = 0,
    straggler: Annotated[float, typer.Option(min=1.0)] = 1.0,
    draw: Annotated[Path | None, typer.Option(metavar="FILE.html")] = None,
    runs: Path | None = None,
    calibrate: Annotated[Path | None, typer.Option(metavar="RUN")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show grid, stages, batch, schedule, parameters, bytes of state and activations of a job.

    Options:
        job_file: The job file.
        grid: Degrees to plan with: --grid tp=2,pp=2
        gpus: With --top: search layouts on so many GPUs; 0 is as the job has ranks.
        top: Show the K fastest layouts that fit; on h100 or cpu without --gpu.
        straggler: Predict with one device that takes so many times as long.
        draw: Draw memory and time line; on h100 or cpu without --gpu.
        runs: A table of published runs to compare with, no job.
        calibrate: The folder of a run that took steps: how wrong was it, and what fits?
        as_json: One JSON object; with --runs one a line.

    Example: raymega plan jobs/verify.yaml --grid tp=2,pp=2
    Example: raymega plan jobs/llama-7b-16gpu.yaml --gpu h100 --top 5
    Example: raymega plan --calibrate my-out/runs/my-run --gpu h100
    Example: raymega plan jobs/llama-70b-512gpu.yaml --gpu h100 --draw plan.html
    """
    raise_faults(ConfigError, _option_faults(job_file, runs or calibrate, num_gpus=gpus, top=top))
    if runs is not None:
        predictions.show_runs(runs, as_json=as_json)
        return
    if calibrate is not None:
        show_calibration(calibrate, gpu, as_json=as_json)
        return
    assert job_file is not None
    degrees = [f"parallel.{pair.strip()}" for pair in grid.split(",") if pair]
    job, choice = api.load_chosen(job_file, [*(overrides or ()), *degrees])
    made = api.plan(job)
    if not as_json:
        predictions.show_choice(choice)
    if top:
        device = _slowed(gpu or _device_of(job), straggler)
        _show_best(made, device, gpus or made.grid.world_size, top=top, as_json=as_json)
        return
    show_plan(made, as_json=as_json, device=_slowed(gpu, straggler) if gpu else None)
    if draw is not None:
        predictions.write_picture(made, _slowed(gpu or _device_of(job), straggler), draw)


def _slowed(gpu: str, straggler: float) -> Accelerator:
    """What ``--gpu`` names; ``--straggler`` counts where it is given, else what a file says."""
    device = find_accelerator(gpu)
    return replace(device, straggler=straggler) if straggler > 1 else device


def _device_of(job: Job) -> str:
    """What to predict for when nobody says: what the job names, or an H100."""
    if job.cluster.accelerator != BY_DEVICE:
        return job.cluster.accelerator
    return "cpu" if job.cluster.device == "cpu" else "h100"


def _option_faults(
    job_file: Path | None, runs: Path | None, *, num_gpus: int, top: int
) -> list[Fault]:
    is_wrong = {
        _NO_JOB: job_file is None and runs is None,
        _TWO_SUBJECTS: job_file is not None and runs is not None,
        _NO_SEARCH: num_gpus > 0 and not top,
    }
    return [fault for fault, holds in is_wrong.items() if holds]


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
