"""The job file's section for failures: what the driver and the workers do when something goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import NonNegative, Positive, PositiveFloat, Section

OnTrouble = Literal["stop", "rerun", "skip", "rollback"]
SpikeWindow = Annotated[int, Field(ge=4, le=1000)]


class ElasticSection(Section):
    """How the driver meets failures."""

    max_failures: NonNegative = Field(
        default=3, description="Restarts of the worker group before the run gives up (exit 4)."
    )
    collective_timeout_s: PositiveFloat = Field(
        default=300.0, description="Longest wait of a collective or a pipeline transfer."
    )
    start_timeout_s: PositiveFloat = Field(
        default=180.0, description="Longest wait for workers to start and to meet."
    )
    stop_timeout_s: PositiveFloat = Field(
        default=120.0,
        description="Longest wait for the last save when a run is asked to stop, and for the start before it "
        "where only snapshots hold the last steps.",
    )
    lease_s: PositiveFloat = Field(
        default=30.0,
        description="How long a driver that shows no sign of life keeps the run to itself. A driver that "
        "takes it up elsewhere waits so long; one that finds the other's process gone does not wait.",
    )
    spares: NonNegative = Field(
        default=0,
        description="Workers held ready beside the grid, loaded and idle; one takes a lost worker's rank "
        "at once, and another is made behind it. A multiple of parallel.tp where tp groups stay on a "
        "node: they move as a whole.",
    )
    min_workers: Positive | Literal["grid"] = Field(
        default=1,
        description="Fewest workers that a run which has lost some goes on with, on the best smaller "
        "grid; `grid` waits for the job's own instead.",
    )
    replan_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=5.0,
        description="How long a run that has lost workers waits for others before it takes a smaller "
        "grid; three times as long for processes that load on nodes that live.",
    )
    scale_up: bool = Field(
        default=True,
        description="Go back to the job's own grid when there are workers for it again and that saves "
        "more time than it costs.",
    )
    scale_up_horizon_s: PositiveFloat = Field(
        default=3600.0,
        description="How long workers that came back are trusted to stay: time saved beyond it does "
        "not count when the cost of growing is weighed.",
    )
    drain_margin_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0,
        description="How long before a draining node is taken away the run leaves it, with a save, even "
        "when no process is ready elsewhere; it leaves at once when one is.",
    )
    snapshot_every: NonNegative = Field(
        default=0,
        description="Steps between snapshots of the state in host memory of the worker's own node "
        "and of a partner node, from which a lost worker or node is made up for; 0 is never.",
    )
    snapshot_backpressure: Literal["wait", "skip"] = Field(
        default="wait",
        description="When a snapshot is due and the one before is still on its way. wait: training "
        "stands still, so that a loss costs no more than snapshot_every says. skip: it is taken "
        "after a later step.",
    )
    snapshot_during_save: Literal["go_on", "pause"] = Field(
        default="go_on",
        description="Snapshots while a checkpoint is being written. go_on: it has a buffer of its own. pause: "
        "it is read from their memory, and none is taken until it is written, so a loss meanwhile costs "
        "the steps since it began; not with checkpoint.buffer_bytes, which is for a buffer of its own.",
    )
    snapshot_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="Longest wait for a file of a snapshot to reach another node's memory, or to "
        "come back.",
    )
    on_nan: OnTrouble = Field(
        default="rerun",
        description="When a step's loss or gradient norm is not finite; no weight has changed yet. "
        "stop: the run ends (exit 5). The others do the step once more, and go on with the second pass "
        "when that is fine. Else rerun ends the run, skip leaves the batch out, and rollback goes back "
        "to the newest checkpoint and passes over the data from there to the end of this batch.",
    )
    on_spike: OnTrouble = Field(
        default="rerun",
        description="The same for a spike, as spike_loss and spike_grad_norm say; but one that comes "
        "again is what the data give, and rerun goes on with it.",
    )
    spike_window: SpikeWindow = Field(
        default=64, description="Steps whose median a spike is held against; none is seen before."
    )
    spike_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=2.0,
        description="A loss above so many times its median is a spike; above 1, or 0 for never.",
    )
    spike_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0, description="The same of the gradient norm before clipping."
    )
    max_bad_steps: Positive = Field(
        default=5,
        description="Batches in a row that skip leaves out, and rollbacks of one driver, before the run "
        "ends (exit 5).",
    )
    replica_check_every: NonNegative = Field(
        default=0,
        description="Steps between looks whether ranks that hold the same weights have the same bits, "
        "which the network or the memory may silently change; every checkpoint is looked at too. 0 is "
        "never.",
    )
    on_divergence: Literal["stop", "rollback"] = Field(
        default="rollback",
        description="When they have not. stop: the run ends (exit 5). rollback: back to the newest "
        "checkpoint, and the steps since are done again.",
    )
    hang_timeout_min_s: PositiveFloat = Field(
        default=1.5,
        description="Least silence after which it is looked whether a rank hangs. The deadline is three "
        "times the median step and 1.5 s, as far as the two bounds let it.",
    )
    hang_timeout_max_s: PositiveFloat = Field(default=300.0, description="Most such silence.")
    straggler_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.5,
        description="A rank whose work in a step takes more than so many times the median of the ranks "
        "of its pipeline stage is told of, with its node; above 1, or 0 for never.",
    )
