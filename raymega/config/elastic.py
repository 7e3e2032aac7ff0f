"""The job file's elastic section: what the driver and the workers do about failures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import NonNegative, Positive, PositiveFloat, Section

OnTrouble = Literal["stop", "rerun", "skip", "rollback"]
SpikeWindow = Annotated[int, Field(ge=4, le=1000)]


class ElasticSection(Section):
    """Handling of failures: restarts, spares, snapshots, bad steps, hangs and stragglers."""

    # Restarts and timeouts.
    max_failures: NonNegative = 3
    """Restarts of the worker group before the run gives up (exit 4)."""
    collective_timeout_s: PositiveFloat = 300.0
    """Longest wait of a collective or a pipeline transfer."""
    start_timeout_s: PositiveFloat = 180.0
    """Longest wait for workers to start and rendezvous."""
    stop_timeout_s: PositiveFloat = 120.0
    """Longest wait for the last save when a run is asked to stop. Where only snapshots hold the
    last steps, also the longest wait for workers to start for that save."""
    lease_s: PositiveFloat = 30.0
    """Time for which a driver that does not renew its lease still owns the run. A driver elsewhere
    waits that long before it takes the run, or not at all when it sees that the owner's process has
    ended."""
    # Spare workers, smaller grids, and growing back.
    spares: NonNegative = 0
    """Number of workers held ready beside the grid, loaded and idle; one takes a lost worker's rank
    at once, and a new spare is started. A multiple of parallel.tp where tp groups stay on a node,
    because they move as a whole."""
    min_workers: Positive | Literal["grid"] = 1
    """Smallest number of workers with which a run that has lost some continues, on the best smaller
    grid; `grid` waits until the job's own grid can be filled."""
    replan_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Longest wait of a run that has lost workers for replacements before it takes a smaller grid;
    three times as long while processes are loading on live nodes."""
    on_replica_loss: Literal["restart", "continue"] = "restart"
    """Reaction to lost workers whose state data-parallel replicas still hold. restart: the run returns
    to the newest snapshot or checkpoint, on the same grid where it can. continue: the other workers
    repeat the step at once with the state in their memory, on fewer replicas where no spare is loaded,
    with the same global batch; what is lost joins again at the end of a step."""
    scale_up: bool = True
    """Return to the job's own grid when there are workers for it again and that saves more time
    than it costs."""
    scale_up_horizon_s: PositiveFloat = 3600.0
    """Time for which workers that came back are expected to stay: time saved beyond it is not
    counted against the cost of a larger grid."""
    drain_margin_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Time before the end of a draining node at which the run saves and leaves it, even when no process
    is ready elsewhere. With a ready process it leaves at once."""
    # Snapshots in the memory of nodes.
    snapshot_every: NonNegative = 0
    """Steps between snapshots of the state in host memory of the worker's own node and of a partner
    node, from which the state of a lost worker or node is restored; 0 is never."""
    snapshot_backpressure: Literal["wait", "skip"] = "wait"
    """Reaction to a snapshot that is due while the one before is still being written. wait: training waits, so
    that a loss costs at most snapshot_every steps. skip: the snapshot is taken after a later step."""
    snapshot_during_save: Literal["go_on", "pause"] = "go_on"
    """Snapshots while a checkpoint is being written. go_on: they continue; the checkpoint has a
    buffer of its own. pause: the checkpoint is written from their memory and none is taken
    meanwhile, so a loss costs the steps since the save began. pause excludes
    checkpoint.buffer_bytes, the limit of the checkpoint's own buffer."""
    snapshot_timeout_s: PositiveFloat = 60.0
    """Longest wait for a file of a snapshot to be written to another node's memory, or read from
    it."""
    # Bad steps: NaN or Inf, spikes, replicas that differ.
    on_nan: OnTrouble = "rerun"
    """Reaction to a loss or gradient norm that is NaN or Inf, before any weight changes. stop: the
    run ends (exit 5). The others repeat the step once, and continue when the second pass is finite.
    Otherwise rerun ends the run, skip leaves the batch out, and rollback returns to the newest
    checkpoint and skips the data from there to the end of this batch."""
    on_spike: OnTrouble = "rerun"
    """Reaction to a spike (spike_loss, spike_grad_norm), as for on_nan; but a spike that repeats is
    put down to the data, and rerun continues with it."""
    spike_window: SpikeWindow = 64
    """Number of past steps whose median a spike is compared with; no spike is detected before that
    many."""
    spike_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """Ratio of a loss to its median above which it is a spike; above 1, or 0 for never."""
    spike_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Ratio of a gradient norm before clipping to its median above which it is a spike; above 1, or
    0 for never."""
    max_bad_steps: Positive = 5
    """Number of consecutive batches that skip leaves out, or of rollbacks of one driver, before the
    run ends (exit 5)."""
    replica_check_every: NonNegative = 0
    """Steps between checks that ranks with the same weights hold the same bits, which network or
    memory errors may silently change. Unless it is 0 (never), the ranks also check before every
    checkpoint."""
    on_divergence: Literal["stop", "rollback"] = "rollback"
    """Reaction when replica_check_every finds a difference. stop: the run ends (exit 5). rollback:
    the run returns to the newest checkpoint and repeats the steps since."""
    # Hangs and stragglers.
    hang_timeout_min_s: PositiveFloat = 1.5
    """Shortest silence after which a rank is examined for a hang. The deadline is three times the
    median step plus 1.5 s, kept between hang_timeout_min_s and hang_timeout_max_s."""
    hang_timeout_max_s: PositiveFloat = 300.0
    """Longest silence after which a rank is examined for a hang."""
    straggler_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.5
    """Ratio of a rank's work time in a step to the median of its pipeline stage's ranks above which
    the rank is reported as a straggler, with its node; above 1, or 0 for never."""
