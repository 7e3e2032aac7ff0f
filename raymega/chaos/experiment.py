"""Chaos drill: a run under faults, the same run undisturbed, and the verdict of their comparison."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

from raymega.chaos.chaos_run import TIMED_OUT, ChaosRun
from raymega.chaos.driver_process import DriverOutput, DriverProcess, driver_command
from raymega.chaos.fault_injector import FaultInjector
from raymega.chaos.faults import KINDS, ChaosFault, ScheduledFault
from raymega.chaos.phase_barriers import FOLDER
from raymega.chaos.processes import Memory, is_alive
from raymega.chaos.run_comparison import RunComparison, compare_runs, surviving
from raymega.chaos.sandbox import Sandbox
from raymega.chaos.time_accounting import Incident, TimeBreakdown, incidents, time_sheet
from raymega.config.schema import Job
from raymega.errors import PreemptedError, RaymegaError
from raymega.plan.run_plan import make_plan
from raymega.storage.local import PARTIAL_FOLDER

CALM_NAME, TRIED_NAME = "undisturbed", "under-faults"
PREEMPTED = PreemptedError.exit_code
NO_FAULT = "no fault was injected: the run was over before the first one"
PATIENCE_S = 15.0
"""Seconds after a run within which all its processes must have ended."""
Undisturbed = Callable[[int], Sequence[DriverOutput]]
"""Function that returns the events of the undisturbed run up to a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillOptions:
    """Options of the command, described in `cli/chaos.py`."""

    faults: str = ""
    mtbf_s: float = 0.0
    kinds: str = ""
    seconds: float = 0.0
    seed: int = 0
    nodes: int = 3
    hold_s: float = 3.0
    return_s: float = 10.0
    timeout_s: float = 3600.0
    out: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosExperiment:
    """Settings of a drill.

    Attributes:
        job_file: Path of the job file.
        overrides: Overrides as ``section.field=value`` texts.
        job: Job of the file with the overrides.
        out: Folder of all output, both runs included.
        options: Options of the command: nodes and times.
        faults: Listed faults; empty for random ones.
        scheduled_faults: Random faults; empty for listed ones.
    """

    job_file: Path
    overrides: Sequence[str]
    job: Job
    out: Path
    options: DrillOptions
    faults: Sequence[ChaosFault] = ()
    scheduled_faults: Iterator[ScheduledFault] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a drill.

    Attributes:
        code: Exit code of the last driver of the run under faults.
        incidents: Outcome of each injected fault.
        missed: Listed faults that were never injected.
        sheet: Wall time by cause.
        comparison: Comparison of losses and samples with the undisturbed run.
        leftovers: Processes, actors and files that the run should have removed.
        memory: Memory of driver and workers after each recovery.
        calm: Events of the undisturbed run.
        tried: Events of the run under faults.
        faults: Reasons why the drill failed, one sentence each; empty when it passed.
    """

    code: int
    incidents: Sequence[Incident]
    missed: Sequence[ChaosFault]
    sheet: TimeBreakdown
    comparison: RunComparison
    leftovers: Sequence[str]
    memory: Sequence[Memory]
    calm: Sequence[DriverOutput]
    tried: Sequence[DriverOutput]
    faults: Sequence[str]


def verdict_object(verdict: Verdict, *, seed: int) -> dict[str, object]:
    """Return the verdict as plain values, for `raymega chaos --json` and report.json."""
    compared = asdict(verdict.comparison)
    if not isfinite(compared["largest"]):  # of a loss that is NaN, which JSON lacks
        compared["largest"] = None
    return {
        "event": "verdict",
        "passed": not verdict.faults,
        "faults": [*verdict.faults],
        "seed": seed,
        "code": verdict.code,
        "incidents": [_incident_object(each) for each in verdict.incidents],
        "goodput": verdict.sheet.goodput,
        "wall_s": verdict.sheet.wall_s,
        "seconds_by_cause": dict(verdict.sheet.by_cause),
        "loss": {
            key: compared[key] for key in ("num_steps", "num_equal", "largest", "at", "limit")
        },
        "leftovers": [*verdict.leftovers],
        "memory": [asdict(each) for each in verdict.memory],
    }


def _incident_object(each: Incident) -> dict[str, object]:
    injected = each.injected
    return {
        "kind": injected.fault.kind,
        "phase": injected.fault.phase,
        "rank": injected.rank,
        "step": injected.step,
        "detection_s": _known(each.detection_s),
        "recovery_s": _known(each.recovery_s),
        "lost_steps": each.lost_steps,
        "source": each.source,
        "grid_before": dict(each.grid_before),
        "grid_after": dict(each.grid_after),
        "cause": each.cause,
    }


def _known(seconds: float) -> float | None:
    return seconds if seconds >= 0 else None


def run_baseline(drill: ChaosExperiment, box: Sandbox, *, last: int) -> Sequence[DriverOutput]:
    """Run the job undisturbed up to step ``last`` on the same cluster, and return its events.

    Raises:
        RaymegaError: The run failed or took longer than the drill's timeout.
    """
    box.fill(drill.options.nodes)
    chaos_run = _chaos_run(drill, box, CALM_NAME, more=_until(drill.job, last), is_calm=True)
    code = chaos_run.run(timeout_s=drill.options.timeout_s)
    if code != 0:
        raise RaymegaError(
            fact=f"the undisturbed run ended with code {code}",
            rule="a drill compares with an undisturbed run that finishes within "
            f"{drill.options.timeout_s:g} s",
            remedy=f"read {chaos_run.driver.errors}",
        )
    return chaos_run.driver.output


def run_drill(drill: ChaosExperiment, box: Sandbox, undisturbed: Undisturbed) -> Verdict:
    """Run the job under faults and return the verdict; ``undisturbed`` gives the events to compare with."""
    # the run under faults, on a cluster with all its nodes
    box.fill(drill.options.nodes)
    chaos_run = _chaos_run(drill, box, TRIED_NAME, is_calm=False)
    code = chaos_run.run(timeout_s=drill.options.timeout_s)
    ended_s = time.monotonic()
    output, begun_s = chaos_run.driver.output, chaos_run.driver.begun_s
    # what became of each fault, and what is left behind
    found = incidents(output, chaos_run.injected_faults, begun_s)
    box.clear()
    shutil.rmtree(chaos_run.injector.folder, ignore_errors=True)
    # Killed processes leave half-written files by design.
    is_tidy = all(KINDS[s.fault.kind].family == "service" for s in chaos_run.injected_faults)
    run = chaos_run.injector.folder.parent if is_tidy else None
    left = _find_leftovers(box, output, driver=chaos_run.driver.pid, run=run)
    # the undisturbed run, as far as the other one came, and the verdict
    last = max(surviving(output), default=0)
    calm = undisturbed(last)
    comparison = compare_runs(calm, output, dtype=drill.job.precision.dtype)
    missed = drill.faults[len(chaos_run.injected_faults) :]
    return Verdict(
        code=code,
        incidents=found,
        missed=missed,
        sheet=time_sheet(output, found, begun_s=begun_s[0], ended_s=ended_s),
        comparison=comparison,
        leftovers=left,
        memory=chaos_run.memory,
        calm=calm,
        tried=output,
        faults=[
            *_ends(code, last, drill.job.run.steps, is_stopped=chaos_run.is_stopped),
            *([] if chaos_run.injected_faults or drill.faults else [NO_FAULT]),
            *(
                f"{fault.describe()} was never injected: the run did not reach its step or phase"
                for fault in missed
            ),
            *_unrecovered(found, is_stopped=chaos_run.is_stopped),
            *comparison.faults,
            *(f"left behind: {name}" for name in left),
        ],
    )


def _ends(code: int, last: int, steps: int, *, is_stopped: bool) -> list[str]:
    if code == TIMED_OUT:
        return ["the run did not end in time"]
    wanted = PREEMPTED if is_stopped else 0
    if code != wanted:
        return [f"the run ended with code {code} instead of {wanted}"]
    # the undisturbed run goes no further than this one, so their comparison does not show it
    is_short = not is_stopped and last < steps
    return [f"the run ended after step {last} of {steps}"] if is_short else []


def _unrecovered(found: Sequence[Incident], *, is_stopped: bool) -> list[str]:
    """Return the faults not detected or not recovered from; the last one before a stop is not judged."""
    wrong = []
    for each in found[:-1] if is_stopped else found:
        fault = each.injected.fault
        if KINDS[fault.kind].ends_attempt and each.detection_s < 0:
            wrong.append(f"{fault.describe()} was never detected")
        elif each.detection_s >= 0 and each.recovery_s < 0:
            wrong.append(f"{fault.describe()} was not recovered from")
    return wrong


def _until(job: Job, last: int) -> list[str]:
    """Return overrides that end the job at step ``last`` with the learning rates of the whole job."""
    if last >= job.run.steps:
        return []
    # A shorter run would decay its learning rate earlier.
    decay = job.optimizer.lr_decay_steps
    end = job.run.steps if decay == "steps" else decay
    # A job has one length.
    others = [f"run.{name}=0" for name in ("tokens", "epochs") if getattr(job.run, name)]
    length = [f"run.steps={last}", *others]
    return [*length, f"optimizer.lr_decay_steps={end}"]


def _chaos_run(
    drill: ChaosExperiment, box: Sandbox, name: str, *, more: Sequence[str] = (), is_calm: bool
) -> ChaosRun:
    folder = drill.out / name
    settings = (*drill.overrides, *more, f"checkpoint.uri={drill.out}", f"run.name={name}")
    drill.out.mkdir(parents=True, exist_ok=True)
    driver = DriverProcess(
        command=driver_command(drill.job_file, box.address, settings),
        errors=drill.out / f"{name}.stderr",
    )
    injector = FaultInjector(
        box=box,
        driver=driver,
        folder=folder / FOLDER,
        database=folder / "mlflow.db",
        num_nodes=drill.options.nodes,
        hold_s=drill.options.hold_s,
        return_s=drill.options.return_s,
    )
    return ChaosRun(
        driver=driver,
        injector=injector,
        world_size=make_plan(drill.job).grid.world_size,
        faults=() if is_calm else drill.faults,
        scheduled_faults=iter(()) if is_calm else drill.scheduled_faults,
        stop_after_s=(0 if is_calm else drill.options.seconds) or float("inf"),
    )


def _find_leftovers(
    box: Sandbox, output: Sequence[DriverOutput], *, driver: int, run: Path | None
) -> list[str]:
    """Return the names of files, processes and actors that are left PATIENCE_S after a run.

    A half-written file of a killed process is kept for a day, in case its writer lives: such files count
    only when no process was killed.

    Args:
        box: Cluster, on which nothing else runs.
        output: Events of the run's drivers.
        driver: Pid of the last driver.
        run: Folder of the run, if it must not hold half-written files; else None.
    """
    workers = [e.event["pids"].values() for e in output if e.name == "workers"]
    pids = {driver, *(pid for started in workers for pid in started)}
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := _left(box, pids, run)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _left(box: Sandbox, pids: set[int], run: Path | None) -> list[str]:
    partial = run / PARTIAL_FOLDER if run else None
    files = sorted(path.name for path in partial.iterdir()) if partial and partial.is_dir() else []
    return [
        *box.leftovers(),
        *(f"process {pid}" for pid in sorted(pids) if is_alive(pid)),
        *(f"half-written file {name}" for name in files),
    ]
