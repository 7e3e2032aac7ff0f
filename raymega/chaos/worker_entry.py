"""What a worker runs under chaos: the training entry, with gates between its phases.

A run is under chaos because its driver names this module instead of train.entry; nothing in
training knows of it.
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

NOBODY = -1


class ChaosError(Exception):
    """What a rank raises when it is told to; the driver knows nothing of it."""


def warm_up(plan_json: str, device: str) -> None:
    """See train.entry; a gate is in front of it."""
    trouble_folders()
    job = read_plan(plan_json).job
    folder = Path(job.checkpoint.uri) / job.run.name / FOLDER
    here = Arrival(pid=os.getpid(), rank=NOBODY, attempt=0, step=0)
    wait_at(folder, here, phase="spawn", world_size=0)
    entry.warm_up(plan_json, device)


def host_rendezvous(host: str) -> tuple[str, object]:
    """See train.entry."""
    return entry.host_rendezvous(host)


def abort() -> None:
    """See train.entry."""
    entry.abort()


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """See train.entry; what it reports passes gates."""
    trouble_folders()
    gates = GatedChannel(channel, start)
    gates.arrive("rendezvous")
    gates.arrive("replan")
    entry.run_worker(start, gates, rendezvous)


class GatedChannel:
    """A Channel that knows from what goes through it which phase its worker is in."""

    def __init__(self, channel: Channel, start: StartWorker) -> None:
        self._channel = channel
        self._folder = Path(start.run_uri) / FOLDER
        self._world_size = read_plan(start.plan_json).grid.world_size
        self._here = Arrival(pid=os.getpid(), rank=start.rank, attempt=start.attempt, step=0)
        self._must_raise = Event()

    def report(self, report: Report) -> None:
        """Pass on what the worker says, and stop at the gate that comes then."""
        if isinstance(report, ShardSaved):  # in the thread that writes: training goes on meanwhile
            self.arrive("upload", is_in_training=False)
        self._channel.report(report)
        if isinstance(report, Entered) and report.phase == "built":
            self.arrive("restore")
        if isinstance(report, StepFinished | Progress):
            self._here = replace(self._here, step=report.step)
            self.arrive("snapshot")

    def requests(self) -> Requests:
        """The loop asks at the begin of each step."""
        begin_step(self._folder)
        self._here = replace(self._here, step=self._here.step + 1)
        self.arrive("step")
        self._here = replace(self._here, step=self._here.step - 1)
        if self._must_raise.is_set():
            raise ChaosError("chaos: told to raise while a checkpoint is written")
        return self._channel.requests()

    def arrive(self, phase: str, *, is_in_training: bool = True) -> None:
        """Wait at a closed gate of ``phase``.

        Raises:
            ChaosError: The answer is to raise.
        """
        answer = wait_at(self._folder, self._here, phase=phase, world_size=self._world_size)
        if answer != RAISE:
            return
        if is_in_training:
            raise ChaosError(f"chaos: told to raise in phase {phase}")
        self._must_raise.set()
