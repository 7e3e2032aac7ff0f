"""Output of predictions in `raymega plan`: step time and memory on a GPU, and the search's result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from raymega.cli.output import print_json, table, write_drawing
from raymega.cli.plan.bill import bill_of
from raymega.config.grid_text import set_options
from raymega.config.schema import Job
from raymega.errors import counted
from raymega.plan.flops import job_flops_per_token
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.run_plan import RunPlan
from raymega.planner.bill import bill_lines
from raymega.planner.calibration.accuracy import expected_error
from raymega.planner.calibration.comparison import PublishedComparison, compare
from raymega.planner.calibration.error_band import TimeBand, band_of, fits_probability
from raymega.planner.calibration.published_runs import PublishedRun, read_runs
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.simulated_step import played_step
from raymega.planner.search.advice import advice_line, advise
from raymega.planner.search.search import MEMORY_MARGIN, RankedLayout, SearchResult
from raymega.planner.search.selection import Choice, seconds

GIB = 2**30
RUN_HEADERS = (
    "source", "model", "GPUs", "published s", "predicted s", "8 of 10 within", "error", "GiB",
    "predicted GiB", "fits",
)  # fmt: skip


def prediction(plan: RunPlan, device: Accelerator) -> RankedLayout:
    """Return the plan with its predicted step time and memory on ``device``."""
    return RankedLayout(plan=plan, time=played_step(plan, device), memory=memory_use(plan))


def prediction_object(found: RankedLayout, device: Accelerator) -> dict[str, object]:
    """Return a prediction as a JSON object."""
    job = found.plan.job
    band, mfu = band_of(job, device), _mfu(found, device)
    return {
        "gpu": device.name,
        "grid": found.plan.grid.degrees(),
        "schedule": job.schedule.name,
        "chunks": found.plan.placement.chunks,
        "micro_batch_size": job.schedule.micro_batch_size,
        "recompute": job.memory.recompute,
        "sharding": job.parallel.sharding,
        "sequence_parallel": job.parallel.sequence_parallel,
        "step_time_s": found.time.total_s,
        "step_time_s_low": found.time.total_s * band.low,
        "step_time_s_high": found.time.total_s * band.high,
        **asdict(found.time),
        "tokens_per_s_per_gpu": found.tokens_per_s,
        "model_tflops_per_gpu": _tflops(found),
        "mfu": mfu,
        "mfu_low": mfu / band.high,
        "mfu_high": mfu / band.low,
        "memory": {**asdict(found.memory), "total_bytes": found.memory.total_bytes},
        "fits": found.memory.total_bytes <= device.memory_bytes,
        "fits_probability": fits_probability(found.memory.total_bytes, device),
        "is_measured": band.is_measured,
        "expected_error": expected_error(device, job),
    }


def show_prediction(found: RankedLayout, device: Accelerator) -> None:
    """Print the parts of the predicted step time and of the fullest rank's memory."""
    time, memory = found.time, found.memory
    # step time by part
    print(f"\non {found.plan.grid.world_size} x {device.name}, predicted step")
    rows = [
        (name, seconds(value), f"{value / time.total_s:.1%}")
        for name, value in time.parts.items()
        # Parts that most jobs lack are left out when they are 0.
        if value or name not in ("sharing", "experts", "straggler")
    ]
    print(table(("part", "time", "share"), [*rows, ("step", seconds(time.total_s), "100.0%")]))
    print(
        f"{found.tokens_per_s:,.0f} tokens/s and {_readable_flops(found)} of model FLOPs per GPU, "
        f"MFU {_mfu(found, device):.1%}"
    )
    print(_interval(found, device))
    # memory of the fullest rank
    fits = fits_probability(memory.total_bytes, device)
    print(
        f"fullest rank: pp {memory.pp_rank}, {memory.state_bytes / GIB:.1f} GiB state, "
        f"{memory.activation_bytes / GIB:.1f} activations, {memory.reserved_bytes / GIB:.1f} reserved: "
        f"fits into {device.memory_bytes / GIB:.0f} GiB with a probability of {fits:.0%}"
    )
    print(expected_error(device, found.plan.job))


def bill_object(found: RankedLayout, device: Accelerator) -> dict[str, object]:
    """Return the cost of the whole run, and what binds its steps, as JSON objects."""
    return {
        "bill": bill_of(found.plan, device, found.time.total_s),
        "binding": advise(found, device),
    }


def show_bill(found: RankedLayout, device: Accelerator) -> None:
    """Print what binds the step and what to try, and the cost of the whole run."""
    print(advice_line(advise(found, device), found, device))
    bill = bill_of(found.plan, device, found.time.total_s)
    print("whole run: " + "\n".join(bill_lines(bill, device)))


def write_picture(plan: RunPlan, device: Accelerator, path: Path) -> None:
    """Write memory and timeline of the plan on ``device`` as one HTML page.

    Raises:
        ConfigError: The file cannot be written.
    """
    from raymega.planner.html_report import draw_plan

    found = prediction(plan, device)
    write_drawing(
        path,
        draw_plan(found, device, bill_of(plan, device, found.time.total_s)),
        rule="it must be a file that can be written, in an existing folder",
        remedy="use --draw plan.html",
    )


def show_choice(choice: Choice | None) -> None:
    """Print why the planner chose the job's layout; nothing when the job gives its own."""
    if choice is None:
        return
    print("parallel.layout=auto")
    for reason in choice.reasons:
        print(f"  {reason}")
    print(f"  same as: {set_options(choice.overrides)}")


def show_search(result: SearchResult, device: Accelerator, job: Job) -> None:
    """Print the best layouts, and how many others each reason ruled out."""
    print(f"\nbest layouts on {device.name}")
    headers = (
        "grid", "schedule", "chunks", "micro-batch", "recompute", "sharding", "step", "tokens/s/GPU",
        "8 of 10 within", "MFU", "GiB", "largest cost besides compute",
    )  # fmt: skip
    print(table(headers, [_search_row(found, device) for found in result.best]))
    # the settings that turn this job into the best layout
    changes = result.best[0].overrides(job)
    print("to get the first from this job: " + (set_options(changes) or "nothing to set"))
    print(_binding(result, device))
    # excluded layouts by reason
    for reason, count in result.refused.most_common():
        print(f"{counted(count, 'other')}: {reason}")
    print(expected_error(device, result.best[0].plan.job))


def _interval(found: RankedLayout, device: Accelerator) -> str:
    """Return the range of step time and MFU in words."""
    band, mfu = band_of(found.plan.job, device), _mfu(found, device)
    return (
        f"8 of 10 steps within {_within(found.time.total_s, band)}, "
        f"MFU {mfu / band.high:.1%} to {mfu / band.low:.1%}"
    )


def _within(step_s: float, band: TimeBand) -> str:
    """Return the range of a step's time, and whether its constants are borrowed."""
    borrowed = "" if band.is_measured else " (constants not measured)"
    return f"{seconds(step_s * band.low)} to {seconds(step_s * band.high)}{borrowed}"


def _binding(result: SearchResult, device: Accelerator) -> str:
    """Return whether memory rules out a faster layout, and by how much."""
    if result.missed is None:
        return "memory does not bind: no layout that exceeds it would be faster"
    missed, best = result.missed, result.best[0]
    options = missed.plan.job
    return (
        f"memory binds: {missed.plan.grid.describe()} with {missed.plan.placement.chunks} chunks, micro-batch "
        f"{options.schedule.micro_batch_size}, recompute {options.memory.recompute} would take "
        f"{seconds(missed.time.total_s)} ({missed.time.total_s / best.time.total_s - 1:+.1%}), and needs "
        f"{missed.memory.total_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB, of which "
        f"{MEMORY_MARGIN:.0%} stay free"
    )


def _search_row(found: RankedLayout, device: Accelerator) -> tuple[object, ...]:
    job, time = found.plan.job, found.time
    others = {name: value for name, value in time.parts.items() if name != "compute"}
    worst = max(others, key=lambda name: others[name])
    return (
        found.plan.grid.describe(), job.schedule.name, found.plan.placement.chunks,
        job.schedule.micro_batch_size, job.memory.recompute, job.parallel.sharding,
        seconds(time.total_s), f"{found.tokens_per_s:,.0f}",
        _within(found.time.total_s, band_of(job, device)),
        f"{_mfu(found, device):.1%}",
        f"{found.memory.total_bytes / GIB:.1f}",
        f"{worst} {others[worst] / time.total_s:.1%}",
    )  # fmt: skip


def show_runs(path: Path, *, as_json: bool) -> None:
    """Print published runs beside their predictions."""
    rows = []
    for run in read_runs(path):
        found = None if run.skipped else compare(run)
        if as_json:
            print_json(_run_object(run, found))
        else:
            rows.append(_run_row(run, found))
    if rows:
        print(table(RUN_HEADERS, rows))


def _run_object(run: PublishedRun, found: PublishedComparison | None) -> dict[str, object]:
    line: dict[str, object] = {
        "source": run.source,
        "model": run.model,
        "published_tflops_per_gpu": run.tflops or None,
        "published_iter_s": run.iter_s or None,
        "published_memory_gib": run.memory_gib or None,
        "published_reserved_gib": run.reserved_gib or None,
    }
    if found is None:
        return {**line, "skipped": run.skipped}
    return {
        **line,
        "predicted_tflops_per_gpu": found.tflops,
        "predicted_iter_s": found.iter_s,
        "predicted_iter_s_low": found.iter_s * found.band.low,
        "predicted_iter_s_high": found.iter_s * found.band.high,
        "predicted_memory_gib": found.memory_gib,
        "fits": found.fits,
        "fits_probability": found.fits_probability,
        "is_measured": found.band.is_measured,
    }


def _run_row(run: PublishedRun, found: PublishedComparison | None) -> tuple[object, ...]:
    head = run.source[:32], run.model, run.num_gpus, f"{run.iter_s:.3f}" if run.iter_s else "-"
    if found is None:
        return (*head, "-", run.skipped, "", "", "", "")
    error = f"{found.iter_s / run.iter_s - 1:+.1%}" if run.iter_s else "-"
    memory = f"{run.memory_gib:.1f}" if run.memory_gib else "-"
    return (
        *head, f"{found.iter_s:.3f}", _within(found.iter_s, found.band), error, memory,
        f"{found.memory_gib:.1f}", f"{found.fits_probability:.0%}",
    )  # fmt: skip


def _mfu(found: RankedLayout, device: Accelerator) -> float:
    """Return model FLOP/s over the device's peak for the job's number format."""
    return _tflops(found) * 1e12 / device.peak_flops(DTYPE_BYTES[found.plan.job.precision.dtype])


def _readable_flops(found: RankedLayout) -> str:
    tflops = _tflops(found)
    return f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{1e3 * tflops:.3g} GFLOP/s"


def _tflops(found: RankedLayout) -> float:
    """Return the model TFLOP/s of one GPU."""
    job = found.plan.job
    return job_flops_per_token(job, seq_len=job.data.seq_len) * found.tokens_per_s / 1e12
