"""The drill: the undisturbed run, the same run under faults, and what there is to say of both."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raymega.chaos.chaos_run import ChaosRun
from raymega.chaos.driver_process import DriverOutput, DriverProcess, driver_command
from raymega.chaos.fault_injector import FaultInjector
from raymega.chaos.faults import KINDS, ChaosFault, ScheduledFault
from raymega.chaos.phase_barriers import FOLDER
from raymega.chaos.processes import Memory, is_alive
from raymega.chaos.run_comparison import RunComparison, compare_runs, surviving
from raymega.chaos.sandbox import Sandbox
from raymega.chaos.time_accounting import Incident, TimeBreakdown, incidents, time_sheet
from raymega.config.schema import Job
from raymega.errors import Fault, PreemptedError, RaymegaError
from raymega.plan.run_plan import make_plan
from raymega.storage.local import PARTIAL_FOLDER

CALM_NAME, TRIED_NAME = "undisturbed", "under-faults"
PREEMPTED = PreemptedError.exit_code
PATIENCE_S = 15.0
"""Seconds until everything that a run started must have ended."""
Undisturbed = Callable[[int], Sequence[DriverOutput]]
"""What the undisturbed run said up to a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosExperiment:
    """What to do.

    Attributes:
        job_file: The job.
        overrides: ``section.field=value`` texts.
        job: What both make.
        out: Folder of all that is written; both runs lie in it.
        num_nodes: Nodes of the cluster, those that are spare included.
        faults: A list of faults; or
        scheduled_faults: faults by chance, until
        stop_after_s: so long after the start.
        hold_s: See FaultInjector.
        return_s: See FaultInjector.
        timeout_s: Longest time of one of the two runs.
    """

    job_file: Path
    overrides: Sequence[str]
    job: Job
    out: Path
    num_nodes: int
    faults: Sequence[ChaosFault] = ()
    scheduled_faults: Iterator[ScheduledFault] = field(default_factory=lambda: iter(()))
    stop_after_s: float = float("inf")
    hold_s: float = 3.0
    return_s: float = 10.0
    timeout_s: float = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of a drill.

    Attributes:
        code: Exit code of the disturbed run's last driver.
        incidents: One for each fault.
        missed: Faults whose moment never came.
        sheet: Where the time went.
        comparison: With the undisturbed run.
        leftovers: What the run should have cleared away.
        memory: Of the driver and of the workers that lived through recoveries.
        calm: What the undisturbed run's driver said.
        tried: What the disturbed one's drivers said.
        faults: Why the drill is failed, one sentence each; none when it is passed.
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
    """The verdict as plain values: what `raymega chaos --json` prints, and a file beside the runs."""
    compared = asdict(verdict.comparison)
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
    """What the undisturbed run says up to step ``last``, on the same cluster.

    Raises:
        RaymegaError: It did not come to its end.
    """
    box.fill(drill.num_nodes)
    chaos_run = _chaos_run(drill, box, CALM_NAME, more=_until(drill.job, last), is_calm=True)
    code = chaos_run.run(timeout_s=drill.timeout_s)
    if code != 0:
        raise RaymegaError(
            Fault(
                fact=f"the undisturbed run ended with code {code}",
                rule="a drill compares with a run that comes to its end within "
                f"{drill.timeout_s:g} s",
                remedy=f"read {chaos_run.driver.errors}",
            )
        )
    return chaos_run.driver.output


def run_drill(drill: ChaosExperiment, box: Sandbox, undisturbed: Undisturbed) -> Verdict:
    """The run under faults, and its verdict; ``undisturbed`` says what to compare it with."""
    box.fill(drill.num_nodes)
    chaos_run = _chaos_run(drill, box, TRIED_NAME, is_calm=False)
    code = chaos_run.run(timeout_s=drill.timeout_s)
    ended_s = time.monotonic()
    output, begun_s = chaos_run.driver.output, chaos_run.driver.begun_s
    found = incidents(output, chaos_run.injected_faults, begun_s)
    box.clear()
    shutil.rmtree(chaos_run.inflicter.folder, ignore_errors=True)  # chaos clears up after itself
    is_tidy = all(KINDS[s.fault.kind].family == "service" for s in chaos_run.injected_faults)
    run = chaos_run.inflicter.folder.parent if is_tidy else None
    left = _find_leftovers(box, output, driver=chaos_run.driver.pid, run=run)
    calm = undisturbed(max(surviving(output), default=0))
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
            *_ends(code, is_stopped=chaos_run.is_stopped),
            *(f"the moment of {fault.describe()} never came" for fault in missed),
            *_unrecovered(found, is_stopped=chaos_run.is_stopped),
            *comparison.faults,
            *(f"left behind: {name}" for name in left),
        ],
    )


def _ends(code: int, *, is_stopped: bool) -> list[str]:
    if code == -1:
        return ["the run did not end in time"]
    wanted = PREEMPTED if is_stopped else 0
    return [] if code == wanted else [f"the run ended with code {code} instead of {wanted}"]


def _unrecovered(found: Sequence[Incident], *, is_stopped: bool) -> list[str]:
    """Faults that were not noticed or not made good; the last one before a stop may be open."""
    wrong = []
    for each in found[:-1] if is_stopped else found:
        fault = each.injected.fault
        if KINDS[fault.kind].ends_attempt and each.detection_s < 0:
            wrong.append(f"{fault.describe()} was never noticed")
        elif each.detection_s >= 0 and each.recovery_s < 0:
            wrong.append(f"{fault.describe()} was not made good")
    return wrong


def _until(job: Job, last: int) -> list[str]:
    """A shorter run of the same job, whose learning rates are the longer one's."""
    if last >= job.run.steps:
        return []
    decay = job.optimizer.lr_decay_steps
    end = job.run.steps if decay == "steps" else decay
    return [f"run.steps={last}", f"optimizer.lr_decay_steps={end}"]


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
    inflicter = FaultInjector(
        box=box,
        driver=driver,
        folder=folder / FOLDER,
        database=folder / "mlflow.db",
        num_nodes=drill.num_nodes,
        hold_s=drill.hold_s,
        return_s=drill.return_s,
    )
    return ChaosRun(
        driver=driver,
        inflicter=inflicter,
        world_size=make_plan(drill.job).grid.world_size,
        faults=() if is_calm else drill.faults,
        scheduled_faults=iter(()) if is_calm else drill.scheduled_faults,
        stop_after_s=float("inf") if is_calm else drill.stop_after_s,
    )


def _find_leftovers(
    box: Sandbox, output: Sequence[DriverOutput], *, driver: int, run: Path | None
) -> list[str]:
    """Names of what a run left behind: files, processes and actors, once they had time to go.

    A process that is gone holds no port and no thread. What a killed process had half written stays for a
    day, so that no living writer loses its file: such files count only when none was killed.

    Args:
        box: The cluster, on which nothing else runs.
        output: All that the run's drivers said.
        driver: Pid of the last of them.
        run: The run's folder, if it may hold no half-written file.
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
