"""Entry module of a training worker; the driver names it by a string, so it never imports torch.

It opens the process groups, builds the components, restores the checkpoint or snapshot that the driver
names, and enters the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import cast

import torch

from raymega.checkpoint.format.keys import checkpoint_of
from raymega.checkpoint.format.manifest import read_blocks
from raymega.checkpoint.load.held_state import HELD, take_over
from raymega.checkpoint.load.reader import boxes_by_name, load, names_of
from raymega.checkpoint.load.shared_load import SharedLoad, groups_to_share
from raymega.checkpoint.save.local_cache import CachedReader, LocalCache
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.snapshots.copies import SnapshotCopies
from raymega.checkpoint.snapshots.writer import SnapshotWriter
from raymega.config.schema import Job
from raymega.errors import CheckpointError, CommunicationError
from raymega.messages import Channel, Entered, StartWorker, Working
from raymega.parallel.comm import world
from raymega.parallel.comm.collectives import is_communication_error
from raymega.parallel.comm.nccl_warmup import open_communicators
from raymega.parallel.comm.process_groups import groups_of_plan
from raymega.parallel.comm.world import Store
from raymega.parallel.context_parallel.varlen_attention import torch_kernel
from raymega.parallel.workarounds.autograd_engine import add_gradients
from raymega.plan.run_plan import RunPlan, read_plan
from raymega.plan.zero_levels import dp_shard_ranks
from raymega.storage.registry import open_store
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.retry import RETRY
from raymega.storage.store import Store as StateStore
from raymega.train.build import TrainingComponents, build_parts
from raymega.train.distillation.teacher import load_teacher
from raymega.train.environment import (
    listen_towards,
    load_lazy_parts,
    prepare_process,
    refused_operation,
)
from raymega.train.forward_backward import sum_over_world
from raymega.train.loop import run_loop
from raymega.train.save_schedule import SaveScheduler, save_limits
from raymega.train.start.weights import every_block, init_from, load_codes
from raymega.train.state import TrainState, first_state, state_from

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Least seconds between two signs of life."""
MAX_COPIES = 2
"""Most copies of a snapshot in the memory of nodes; see `plan/snapshot_replicas.py`."""


def warm_up(plan_json: str, device: str) -> None:
    """Load ahead what the first step needs: kernel libraries, CUDA context, torch's lazy modules."""
    plan = read_plan(plan_json)
    where = prepare_process(plan, device=device, local_rank=0)
    load_lazy_parts(plan, where.type)
    # a first kernel and a first backward
    loss = torch.ones(1, device=where, requires_grad=True).sum()
    add_gradients(loss, torch.ones_like(loss))
    if where.type == "cuda":
        torch_kernel()


def host_rendezvous(host: str) -> tuple[str, object]:
    """Open the rendezvous store of this attempt's ranks, on a free port of ``host``."""
    return world.host_store(host)


def abort() -> None:
    """Abort all pending collectives of this process; called from a control thread."""
    world.abort_world()


def held_step() -> int:
    """Return the step of the state that this process keeps from its last attempt; -1 for none."""
    return HELD.step


MakeEvaluator = Callable[[TrainingComponents, StartWorker, Channel], Callable[[int], None]]
"""Function that makes what evaluates a run's tasks after a step, on the ranks that train."""


def run_worker(
    start: StartWorker,
    channel: Channel,
    rendezvous: object,
    make_evaluator: MakeEvaluator | None = None,
) -> None:
    """Train as rank ``start.rank`` to the last step or a stop request; raise what goes wrong.

    ``make_evaluator`` is for entry modules that evaluate tasks as well; see `evaluate/training_entry.py`.
    """
    if not (start.is_held and start.is_holder):  # of an earlier attempt, and of no use to this one
        HELD.drop()
    plan = read_plan(start.plan_json)
    device = prepare_process(plan, device=start.device, local_rank=start.local_rank)
    try:
        phases = _Phases(channel, start.rank)
        listen_towards(start.rendezvous)
        world.open_world(
            rank=start.rank,
            world_size=plan.grid.world_size,
            rendezvous=start.rendezvous,
            store=cast(Store | None, rendezvous),
            timeout_s=plan.job.elastic.collective_timeout_s,
            device=device,
        )
        _train(plan, start, channel, device, phases, make_evaluator)
    except Exception as error:
        # Whatever fails after an abort may have read what an aborted kernel left.
        abort_error = world.abort_error("a step")
        # Closing would wait for pending operations; an abort frees the peers at once.
        world.abort_world()
        if abort_error is not None and not is_communication_error(error):
            raise abort_error from error
        refusal = refused_operation(error)
        if refusal:
            raise refusal from error
        if is_communication_error(error) and not isinstance(error, CommunicationError):
            raise CommunicationError(str(error)) from error
        raise
    finally:
        HELD.leave_device()
    world.close_world()


def _train(
    plan: RunPlan,
    start: StartWorker,
    channel: Channel,
    device: torch.device,
    phases: _Phases,
    make_evaluator: MakeEvaluator | None,
) -> None:
    """Build, restore and run the loop; the world is open."""
    timeout_s = plan.job.elastic.collective_timeout_s
    # rendezvous: process groups; NCCL communicators open now rather than in the first step
    groups = groups_of_plan(plan, start.rank, timeout_s=timeout_s)
    if device.type == "cuda":
        open_communicators(groups, device)
    phases.passed("rendezvous")
    progress = ProgressReporter(channel, start.rank)
    # build
    parts = build_parts(
        plan,
        rank=start.rank,
        groups=groups,
        device=device,
        progress=progress,
        has_initial_values=not start.restore,  # every value comes from the checkpoint then
    )
    phases.passed("built")
    # restore
    if parts.teacher is not None:  # it is in no checkpoint of the run, and no process holds it
        uri = plan.job.distillation.teacher_checkpoint
        load_teacher(parts.teacher, uri, progress=progress)
    is_unfinished = start.is_held and not HELD.is_finished
    state = _go_on(parts, start, channel) if start.is_held else _restore(parts, start, progress)
    is_evaluation_due = start.is_held and sum_over_world(parts, [float(is_unfinished)])[0] > 0
    HELD.drop()
    if plan.job.elastic.on_replica_loss == "continue":
        HELD.begin(every_block(parts), state.scalars())
    phases.passed("restored")
    # savers: checkpoints to the run's store, snapshots to the memory of nodes
    near = _near_store(plan.job)
    writer = CheckpointWriter(
        open_store(start.run_uri),
        rank=start.rank,
        attempt=start.attempt,
        report=channel.report,
        last_retry=RETRY.lasting(plan.job.checkpoint.last_save_retry_s),
        limits=save_limits(plan),
        local_cache=LocalCache(near) if near else None,
    )
    snapshots = None
    if plan.job.elastic.snapshot_every:
        snapshots = SnapshotWriter(
            plan, rank=start.rank, attempt=start.attempt, replicas=start.replicas
        )
    save_scheduler = SaveScheduler(
        parts, channel=channel, writer=writer, snapshots=snapshots, rank=start.rank
    )
    save_scheduler.reserve()
    # train
    run_loop(
        parts,
        state,
        channel=channel,
        save_scheduler=save_scheduler,
        rank=start.rank,
        skipped_samples=start.skipped_samples,
        is_evaluation_due=is_evaluation_due,
        evaluate_tasks=make_evaluator(parts, start, channel) if make_evaluator else None,
    )


def _near_store(job: Job) -> StateStore | None:
    """Return the run's folder in ``checkpoint.local_uri`` on this node's disk; None without."""
    uri = job.checkpoint.local_uri
    return None if uri == "none" else open_store(f"{uri.rstrip('/')}/{job.run.name}")


def _go_on(parts: TrainingComponents, start: StartWorker, channel: Channel) -> TrainState:
    """Return the state that the ranks hold in memory; tell the driver of a step that it has not heard of."""
    at = checkpoint_of(start.restore)
    assert at is not None, f"{start.restore} is the key of a state"
    replicas = parts.groups.replicas
    if dp_shard_ranks(parts.plan.job.parallel, replicas.size) > 1:
        replicas = parts.groups.copies
    scalars, report = take_over(HELD, [*every_block(parts)], replicas, step=at.step)
    # codes are not held: the base is read and encoded anew
    load_codes(parts, parts.plan.job.checkpoint)
    parts.optimizer.sync_weights()
    if report is not None and start.rank == 0 and at.step > start.reported_step:
        channel.report(report)
    return state_from(scalars, parts.plan.job.precision)


def _restore(
    parts: TrainingComponents, start: StartWorker, progress: ProgressReporter
) -> TrainState:
    precision = parts.plan.job.precision
    # with adapters a run's own checkpoint lacks the base, which is read anew; it has the adapters
    section = parts.plan.job.checkpoint
    if start.restore:
        section = section.model_copy(update={"init_adapter": "none"})
    if not start.restore:
        _begin_data(parts, first_state(precision), start)
    if not start.restore or parts.plan.job.model.lora.r:
        init_from(parts, section, is_resumed=bool(start.restore), progress=progress)
    if not start.restore:
        return first_state(precision)
    # A broken copy in memory has a second one; only the last failure ends the attempt.
    *others, last = _stores_to_restore_from(start)
    for store in others:
        try:
            return _restore_from(store, parts, start, progress)
        except CheckpointError as error:
            log.warning("the other copy is next: %s", error)
    return _restore_from(last, parts, start, progress)


def _begin_data(parts: TrainingComponents, state: TrainState, start: StartWorker) -> None:
    """Begin to read the rows of the first step, beside what loads the weights."""
    samples = state.past(start.skipped_samples).samples
    parts.loader.begin(parts.plan.batch_at(samples), samples)


def _stores_to_restore_from(start: StartWorker) -> list[StateStore]:
    """Return the run's store, or snapshot servers in MAX_COPIES orders, each copy first once."""
    replicas = start.replicas
    if not replicas.read_from.servers:
        return [open_store(start.run_uri)]
    held = replicas.read_from
    servers = {address: RemoteMemoryStore(address, replicas.token) for address in held.servers}
    return [
        SnapshotCopies(servers, held, first=start.rank + number) for number in range(MAX_COPIES)
    ]


def _restore_from(
    store: StateStore, parts: TrainingComponents, start: StartWorker, progress: ProgressReporter
) -> TrainState:
    # the boxes that this rank reads: a large world's manifest leaves the others in its index
    job, local_cache, key = parts.plan.job, _near_store(parts.plan.job), start.restore
    reads_alone = isinstance(store, SnapshotCopies) or local_cache or job.memory.offload
    groups = () if reads_alone else groups_to_share(parts.groups, store.uri)
    shared = SharedLoad(list(parts.optimizer.blocks()), groups)
    blocks = shared.mine
    if isinstance(store, SnapshotCopies):
        grid = parts.plan.grid
        manifest = store.read_blocks(key, boxes_by_name(blocks), rank=start.rank, grid=grid)
    else:
        manifest = read_blocks(store, key, boxes_by_name(blocks))
    state = state_from(manifest.state, job.precision)
    _begin_data(parts, state, start)
    source = store
    # what memory holds needs no disk
    if local_cache is not None and not isinstance(store, SnapshotCopies):
        source = CachedReader(local_cache, store, manifest)
    # fill masters and moments, then round the weights from the masters
    load(source, manifest, blocks, expected=names_of(parts.plan.job), progress=progress)
    shared.send(progress)
    parts.optimizer.sync_weights()
    files_near = source.num_near if isinstance(source, CachedReader) else 0
    log.info(
        "restored step %d from %s in %s, %d near files", manifest.step, key, store.uri, files_near
    )
    return state


class _Phases:
    """Reporter of the seconds that each phase of the start took."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel, self._rank, self._since = channel, rank, time.monotonic()

    def passed(self, phase: str) -> None:
        now = time.monotonic()
        self._channel.report(Entered(rank=self._rank, phase=phase, seconds=now - self._since))
        self._since = now


class ProgressReporter:
    """Sign of life from inside long operations, such as a load, for the driver's hang detector.

    It is called after each portion of work, from any thread, and reports at most once in INTERVAL_S.
    """

    def __init__(
        self, channel: Channel, rank: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._rank, self._clock = channel, rank, clock
        self._last_s = clock()

    def __call__(self) -> None:
        """Report a sign of life, unless the last one is younger than INTERVAL_S."""
        now_s = self._clock()
        if now_s - self._last_s >= INTERVAL_S:
            self._last_s = now_s
            self._channel.report(Working(rank=self._rank))
