"""Entry module of workers under chaos: the training entry with gates between its phases.

`chaos/driver_entry.py` passes this module to workers instead of `train/entry.py`, which needs no change for it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Event

from raymega.chaos.faulty_store import trouble_folders
from raymega.chaos.phase_barriers import FOLDER, RAISE, Arrival, begin_step, wait_at
from raymega.events import StepFinished
from raymega.messages import (
    Channel,
    Entered,
    Progress,
    Report,
    Requests,
    ShardSaved,
    StartWorker,
)
from raymega.plan.run_plan import read_plan
from raymega.train import entry

NO_RANK = -1


class ChaosError(Exception):
    """Error that a rank raises for the fault ``raise``; the driver does not expect it."""


def warm_up(plan_json: str, device: str) -> None:
    """Wait at a gate of phase ``spawn``, then warm up as in `train/entry.py`."""
    trouble_folders()
    job = read_plan(plan_json).job
    folder = Path(job.checkpoint.uri) / job.run.name / FOLDER
    here = Arrival(pid=os.getpid(), rank=NO_RANK, attempt=0, step=0)
    wait_at(folder, here, phase="spawn", world_size=0)
    entry.warm_up(plan_json, device)


def host_rendezvous(host: str) -> tuple[str, object]:
    """Host the rendezvous, as in `train/entry.py`."""
    return entry.host_rendezvous(host)


def abort() -> None:
    """Abort the collectives, as in `train/entry.py`."""
    entry.abort()


def held_step() -> int:
    """Return the step of the state that is held, as in `train/entry.py`."""
    return entry.held_step()


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Train as in `train/entry.py`, with a channel that waits at gates."""
    trouble_folders()
    gates = GatedChannel(channel, start)
    gates.arrive("rendezvous")
    gates.arrive("replan")
    entry.run_worker(start, gates, rendezvous)


class GatedChannel:
    """Channel that derives the phase of its worker from the reports, and waits at gates."""

    def __init__(self, channel: Channel, start: StartWorker) -> None:
        self._channel = channel
        self._folder = Path(start.run_uri) / FOLDER
        self._world_size = read_plan(start.plan_json).grid.world_size
        self._here = Arrival(pid=os.getpid(), rank=start.rank, attempt=start.attempt, step=0)
        self._must_raise = Event()

    def report(self, report: Report) -> None:
        """Forward the report, and wait at the gate of the phase that it begins or ends."""
        if isinstance(report, ShardSaved):  # in the writer thread, while training continues
            self.arrive("upload", is_in_training=False)
        self._channel.report(report)
        if isinstance(report, Entered) and report.phase == "built":
            self.arrive("restore")
        if isinstance(report, StepFinished | Progress):
            self._here = replace(self._here, step=report.step)
            self.arrive("snapshot")

    def requests(self) -> Requests:
        """Wait at the gate of a step, which the training loop begins with this call."""
        begin_step(self._folder)
        # The gate of a step has the number of the step that begins.
        self._here = replace(self._here, step=self._here.step + 1)
        self.arrive("step")
        self._here = replace(self._here, step=self._here.step - 1)
        if self._must_raise.is_set():
            raise ChaosError("chaos: told to raise while a checkpoint is written")
        return self._channel.requests()

    def arrive(self, phase: str, *, is_in_training: bool = True) -> None:
        """Wait at a gate of ``phase``, if one fits.

        Raises:
            ChaosError: The gate's answer is to raise, and this is the training thread.
        """
        answer = wait_at(self._folder, self._here, phase=phase, world_size=self._world_size)
        if answer != RAISE:
            return
        if is_in_training:
            raise ChaosError(f"chaos: told to raise in phase {phase}")
        # The writer thread cannot end training: raise at the next step.
        self._must_raise.set()
