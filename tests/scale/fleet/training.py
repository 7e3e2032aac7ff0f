"""Workers of a simulated fleet: each attempt trains with the engine's own positions in the data, saves and ends.

Every sample that a rank reads is counted, step by step; a checkpoint carries what its history has trained.
"""

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.keys import checkpoint_of, data_file, folder_of
from raymega.checkpoint.format.manifest import read_manifest
from raymega.errors import CheckpointError, StorageError
from raymega.events import StepFinished
from raymega.messages import Entered, Progress, ShardSaved, WorkerFailed, WorkerFinished
from raymega.orchestrate.core.worker_group_api import ThreadStatus
from raymega.plan.batch import batch_at
from raymega.plan.run_plan import read_plan
from raymega.train.state import first_state, state_from
from tests.scale.fleet.cluster import BEAT_S, Actor

PHASES = ("rendezvous", "built", "restored")


class Worker(Actor):
    """A worker's process: it comes once its group has a node, loads, and then trains when it is told to."""

    def __init__(self, cluster, owner, group, number, fleet):
        super().__init__(cluster, owner)
        self.group, self.number, self.fleet, self.node = group, number, fleet, None
        self.mailbox, self.reports_ref, self.training, self.rank = [], None, None, -1
        self.step, self.is_stuck, self._waiting = 0, False, []
        self.held = self.held_before = None  # state and samples after the last two whole steps
        if group.node is not None:
            self.be_placed(group.node)

    def be_placed(self, node):
        self.node = node
        for action in self._waiting:
            action()
        self._waiting.clear()

    def _when_placed(self, action):
        if self.node is None:
            self._waiting.append(action)
        else:
            action()

    # Its calls.

    def on_hold(self, ref):
        """Never answers."""

    def on_preload(self, ref, plan_json, device):
        load_s = self.cluster.draw.uniform(5.0, 20.0)
        self._when_placed(lambda: self.reply(ref, delay_s=load_s))

    def on_location(self, ref):
        def tell():
            at = self.cluster.place_of(self.group, self.number)
            self.reply(ref, at, delay_s=self.cluster.draw.uniform(0.5, 4.0))

        self._when_placed(tell)

    def on_host_rendezvous(self, ref, address):
        self.reply(ref, f"{address}:1", delay_s=0.1)

    def on_start(self, ref, message, log_path, *shared):
        self.reply(ref, delay_s=0.1)
        self.rank, self.mailbox, self.is_stuck = message.rank, [], False
        if not (message.is_held and message.is_holder):
            self.held = self.held_before = None
        self.training = self.fleet.training_of(self.owner, message)
        self.training.join(self)

    def on_set_requests(self, ref, requests, attempt):
        self.reply(ref)
        if self.training is not None and self.training.attempt == attempt:
            self.training.request(self, requests)

    def on_abort(self, ref, patience_s, attempt):
        if self.training is not None and self.training.attempt == attempt:
            self.training.stop()
        is_free = not self.is_stuck
        if is_free:
            self.training, self.mailbox = None, []
        held_step = self.held[0].step if self.held else -1
        self.reply(ref, held_step if is_free else None, delay_s=0.5 if is_free else patience_s)

    def on_thread_status(self, ref):
        waits_for = "" if self.is_stuck else "all_reduce"
        status = ThreadStatus(
            rank=self.rank, step=self.step, doing="", waits_for=waits_for, is_patient=False,
            state="S", cpu_s=0.0, stack=("train_step",),
        )  # fmt: skip
        self.reply(ref, status, delay_s=0.1)

    def on_process_status(self, ref, pid):
        self.reply(ref, "S", delay_s=0.1)

    def on_next_reports(self, ref, timeout_s):
        self.reports_ref = ref
        if self.mailbox:
            self.reply(ref, self.pop_reports())
        else:
            self.cluster.timeline.after(max(BEAT_S, timeout_s), self._beat, ref)

    def _beat(self, ref):
        if not ref.is_ready and not self.is_dead:
            self.reply(ref, self.pop_reports())

    # Its reports.

    def report(self, *reports):
        if self.is_dead:
            return
        self.mailbox += reports
        if self.reports_ref is not None and not self.reports_ref.is_ready:
            self.reply(self.reports_ref, self.pop_reports())
        for monitor in self.cluster.monitors:
            if self in monitor.workers.values():
                monitor.look()

    def pop_reports(self):
        found, self.mailbox = self.mailbox, []
        return found

    def die(self):
        super().die()
        if self.training is not None:
            self.training.lose(self)
        for monitor in self.cluster.monitors:
            if self in monitor.workers.values():
                monitor.look()


class Training:
    """The training of one attempt, on all its ranks together."""

    def __init__(self, fleet, owner, message):
        self.owner, self.fleet = owner, fleet
        self.timeline, self.draw = fleet.timeline, fleet.draw
        self.attempt, self.restore = message.attempt, message.restore
        self.skipped = message.skipped_samples
        self.plan, self.is_held = read_plan(message.plan_json), message.is_held
        # fewer replicas have more micro-batches each
        full = fleet.plan.batch.num_micro_batches
        self.step_s = fleet.step_s * self.plan.batch.num_micro_batches / full
        self.workers, self.is_over = {}, False
        self.requests = {"save": False, "stop": False, "regroup": False}
        self.state, self.trained, self.is_saving, self.is_last = None, (), False, False
        self.num_checked = self.num_saved = self.saved_step = 0

    # From the start to the first step.

    def join(self, worker):
        self.workers[worker.rank] = worker
        if len(self.workers) == self.plan.grid.world_size:
            self._later(self.draw.uniform(0.5, 3.0), self._enter, 0)

    def _enter(self, number):
        if PHASES[number] == "restored" and not self._restore():
            return
        phase = PHASES[number]
        for rank, worker in self.workers.items():
            worker.report(Entered(rank=rank, phase=phase, seconds=0.1))
        if number + 1 < len(PHASES):
            self._later(self.draw.uniform(0.5, 5.0), self._enter, number + 1)
        else:
            self._later(self.step_s, self._step)

    def _restore(self):
        """Load the state, as workers do; a checkpoint that cannot be read is an error of rank 0."""
        self.state = first_state(self.plan.job.precision)
        if self.is_held:
            return self._take_over()
        if self.restore:
            try:
                manifest = read_manifest(self.fleet.objects, self.restore)
                for key, size in manifest.file_sizes().items():
                    if self.fleet.objects.size(key) != size:
                        raise CheckpointError(f"{key} is cut")
            except (CheckpointError, KeyError) as error:
                self.fleet.accuse(f"{self.restore} was to be restored and is not whole: {error!r}")
                return False
            self.state = state_from(manifest.state, self.plan.job.precision)
            self.trained = self.fleet.witness.trained_by[checkpoint_of(self.restore)]
        self._hold()
        return True

    def _take_over(self):
        """Continue from what the workers hold: of each place on the grid some replica must hold the step."""
        step, grid = checkpoint_of(self.restore).step, self.plan.grid
        holders = {}
        for rank, worker in self.workers.items():
            if worker.held and worker.held[0].step == step:
                at = grid.coords(rank)
                holders[at.tp, at.cp, at.pp] = worker.held
        if len(holders) != grid.world_size // grid.dp:
            self.fleet.accuse(f"of {self.restore} only {sorted(holders)} are held")
            return False
        self.state, self.trained = next(iter(holders.values()))
        if any(held != (self.state, self.trained) for held in holders.values()):
            self.fleet.accuse(f"different states of {self.restore} are held")
        self.fleet.witness.num_held += 1
        self._hold()
        return True

    def _hold(self):
        for worker in self.workers.values():
            is_next = worker.held and worker.held[0].step == self.state.step - 1
            worker.held_before = worker.held if is_next else None
            worker.held = (self.state, self.trained)

    # Steps.

    def _step(self):
        job = self.plan.job
        if self.is_saving and self._is_due(self.state.step + 1):  # the save before is still written
            self._later(1.0, self._step)
            return
        self.state = self.state.past(self.skipped)
        first = self.state.samples
        batch = batch_at(self.plan.ramp, self.plan.batch, first)
        self.trained = self._read(batch, first)
        self.state = self.state.advance(samples=batch.global_batch_size, tokens=1)
        self._hold()
        self.fleet.witness.see_step(self)
        step = self.state.step
        metrics = {"train/loss": 1.0, "train/step_time_s": self.step_s}
        for rank, worker in self.workers.items():
            worker.step = step
            worker.report(
                StepFinished(step=step, metrics=metrics) if rank == 0
                else Progress(rank=rank, step=step)
            )  # fmt: skip
        self.is_last = step >= job.run.steps or self.requests["stop"]
        if self._is_due(step) or self.is_last or self.requests["save"]:
            self.requests["save"], self.is_saving, self.saved_step = False, True, step
            self.fleet.witness.see_save(self.attempt, step, self.trained)
            for rank in self.workers:
                self._save(rank, step, self.state.scalars(), number=0)
        if self.requests["regroup"] and not self.is_last and not self.is_saving:
            self._finish(step)
        elif not self.is_last:
            self._later(self.step_s, self._step)

    def _finish(self, step):
        for rank, worker in self.workers.items():
            worker.report(WorkerFinished(rank=rank, step=step, stopped=True))
        self.is_over = True

    def _is_due(self, step):
        every = self.plan.job.checkpoint.every
        return every > 0 and step % every == 0

    def _read(self, batch, first):
        """Return the trained samples with this step's: ranges (first, end); every rank's are looked at now and then."""
        self.num_checked += 1
        if self.num_checked <= 2:
            rows = [
                sample
                for replica in range(batch.dp)
                for number in range(batch.num_micro_batches)
                for sample in batch.samples(number, replica, first)
                if sample >= 0
            ]
            if sorted(rows) != list(range(first, first + batch.global_batch_size)):
                self.fleet.accuse(f"attempt {self.attempt} reads {sorted(rows)} from {first} on")
        end = first + batch.global_batch_size
        if self.trained and self.trained[-1][1] == first:
            return (*self.trained[:-1], (self.trained[-1][0], end))
        return (*self.trained, (first, end))

    # Saves.

    def _save(self, rank, step, state, number):
        """Write a rank's file; a store that fails is tried three times."""
        name, key = data_file(attempt=self.attempt, rank=rank), folder_of(step)
        store, error = self.fleet.store, ""
        begun_s = store.put_time_s()
        try:
            store.check()
            self.fleet.objects.put(key + name, [b"12345678"], overwrite=True)
        except StorageError as raised:
            if number < 2:
                self._later(5.0, self._save, rank, step, state, number + 1)
                return
            error = str(raised)
        world_size = self.plan.grid.world_size
        box = SavedBox(
            tensor="model/weight", dtype="float64", global_shape=(world_size,),
            box=Box(offset=(rank,), shape=(1,)), file=name, start=0, num_bytes=8, crc32=0,
        )  # fmt: skip
        shard = ShardSaved(
            rank=rank, step=step, boxes=() if error else (box,), state=state, stall_s=0.1,
            write_s=begun_s, num_bytes=8, error=error,
        )  # fmt: skip
        self._later(begun_s, self._end_save, shard)

    def _end_save(self, shard):
        self.workers[shard.rank].report(shard)
        self.num_saved += 1
        if self.num_saved == len(self.workers):
            self.num_saved, self.is_saving = 0, False
            if self.is_last and shard.step == self.state.step:
                self._finish(shard.step)

    # Requests and failures.

    def request(self, worker, requests):
        self.requests["stop"] |= requests.stop
        self.requests["save"] |= requests.save and worker.rank == 0
        self.requests["regroup"] |= requests.regroup and worker.rank == 0

    def stop(self):
        self.is_over = True

    def lose(self, worker):
        """A rank's process has died: the others lose their connections a moment later."""
        if self.is_over or self.workers.get(worker.rank) is not worker:
            return
        self.is_over = True
        # some ranks may not have heard of the step's sums, so they did not update; then no save had begun
        was_saved = self.state and self.saved_step == self.state.step
        if self.state and not was_saved and self.draw.random() < 0.3:
            for other in self.workers.values():
                if other.held_before and self.draw.random() < 0.5:
                    other.held = other.held_before
        for rank, other in self.workers.items():
            if not other.is_dead and self.draw.random() < 0.7:
                broken = WorkerFailed(
                    rank=rank, step=other.step, error="CommunicationError", message="lost a peer",
                    traceback="", is_secondary=True,
                )  # fmt: skip
                self.timeline.after(self.draw.uniform(0.1, 3.0), other.report, broken)

    def get_stuck(self):
        """One rank's thread waits for nothing; the others wait for it."""
        if not self.is_over and len(self.workers) == self.plan.grid.world_size:
            self.workers[self.draw.randrange(len(self.workers))].is_stuck = True
            self.is_over = True

    def _later(self, seconds, action, *args):
        self.timeline.after(seconds, self._unless_over, action, args)

    def _unless_over(self, action, args):
        if not self.is_over:
            action(*args)
