"""The drivers of a simulated run, and the store as they see it."""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace

from raymega.checkpoint.format.epochs import LEASES, LeaseHolder, grant_key, newest_epoch
from raymega.checkpoint.format.keys import is_manifest
from raymega.errors import RaymegaError, StorageError
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.run_store.lease import RENEWALS, Lease
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.storage.retry import RETRY, RetryingStore
from raymega.storage.store import DelegatingStore
from tests.scale.fleet.timeline import Killed, LaterExecutor
from tests.support.memory_store import MemoryStore


class Objects(MemoryStore):
    """The store as it is, beyond its faults; it shows the witness each manifest.

    Its keys are sorted once after each change: a life lists them a hundred thousand times.
    """

    def __init__(self, fleet):
        super().__init__()
        self._fleet, self._keys = fleet, None

    def put(self, key, chunks, *, overwrite):
        if key not in self._objects:
            self._keys = None
        super().put(key, chunks, overwrite=overwrite)
        if is_manifest(key):
            self._fleet.witness.see_commit(key)
        elif not overwrite and (epoch := newest_epoch(self)) and key == grant_key(epoch):
            self._fleet.witness.see_grant(epoch)

    def delete(self, key):
        super().delete(key)
        self._keys = None

    def list(self, prefix):
        if self._keys is None:
            self._keys = sorted(self._objects)
        first = bisect_left(self._keys, prefix)
        after = bisect_left(self._keys, prefix + "\x7f")
        yield from self._keys[first:after]


class Weather:
    """State of the store for all who use it: how long a write takes, and the share of requests that fail."""

    def __init__(self, fleet):
        self._fleet, self.put_s, self.fails = fleet, 0.05, 0.0

    def put_time_s(self):
        return self._fleet.draw.uniform(0.2, 2.0) * self.put_s

    def check(self):
        if self._fleet.draw.random() < self.fails:
            raise StorageError("the store is down")


class DriverStore(DelegatingStore):
    """The store as one driver sees it: it fails, is slow, and the driver may be killed before any write."""

    def __init__(self, fleet, driver):
        super().__init__(fleet.objects)
        self._fleet, self._driver, self.puts_to_live = fleet, driver, -1

    def put(self, key, chunks, *, overwrite):
        if self._driver.is_doomed or self.puts_to_live == 0:
            self._driver.is_doomed = True
            raise Killed
        self.puts_to_live -= 1
        self._driver.sleep(self._fleet.store.put_time_s())
        if key.startswith(LEASES) and not self._driver.lease.epoch:
            self._driver.meet_rival()
        self._fleet.store.check()
        super().put(key, chunks, overwrite=overwrite)

    def get(self, key, *, start=0, num_bytes=-1):
        self._fleet.store.check()
        return super().get(key, start=start, num_bytes=num_bytes)

    def size(self, key):
        self._fleet.store.check()
        return super().size(key)

    def list(self, prefix):
        self._fleet.store.check()
        return super().list(prefix)

    def delete(self, key):
        self._fleet.store.check()
        super().delete(key)


class Sink:
    """Counts events by kind."""

    def __init__(self):
        self.counts = Counter()

    def emit(self, event):
        self.counts[type(event).__name__] += 1


class Driver:
    """One driver's process."""

    def __init__(self, fleet, number):
        self.fleet, self.number = fleet, number
        self.is_alive, self.is_doomed, self.paused_until_s = True, False, 0.0
        self.is_writing = False  # in the control loop's thread, which may hold locks meanwhile
        self.store = DriverStore(fleet, self)
        holder = LeaseHolder(host="h", pid=number, machine="m", started="", token=str(number))
        timeline = fleet.timeline
        retry = replace(RETRY, sleep=self.sleep)
        self.lease = Lease(
            RetryingStore(self.store, retry=retry), holder=holder, duration_s=30.0, clock=timeline,
            sleep=timeline.sleep, knows_gone=fleet.knows_gone,
        )  # fmt: skip
        self.executor = LaterExecutor(timeline, self, fleet.draw)
        self.controller = self.context = self.group = None
        self.has_rival = fleet.draw.random() < 0.3
        # when the state to start from was last looked for, and since when the lease is another's
        self.found_s = self.lost_s = timeline.now_s

    @property
    def is_paused(self):
        return self.fleet.timeline.now_s < self.paused_until_s

    def sleep(self, seconds):
        """Wait for the store."""
        if self.fleet.timeline.debts:
            self.fleet.timeline.sleep(seconds)
            return
        self.is_writing = True
        self.fleet.timeline.sleep(seconds)
        self.is_writing = False

    def meet_rival(self):
        """Let another driver take the lease between this one's look and its write, at times."""
        if self.has_rival and self.controller is None and not self.fleet.disturbances.is_over:
            self.has_rival = False
            self.fleet.begin_driver()

    def begin(self):
        fleet = self.fleet
        self.lease.acquire()
        fleet.timeline.after(self.lease.duration_s / RENEWALS, self._renew)
        self.group = RayWorkerGroup(fleet.plan, log_dir=fleet.folder, can_grow=True)
        context = RunContext(
            fleet.plan, lease=self.lease, group=self.group, sink=fleet.sink, clock=fleet.timeline,
            executor=self.executor,
        )  # fmt: skip
        self.context, self.controller = context, Controller(context)
        context.open()
        self.found_s = self.lost_s = fleet.timeline.now_s
        return True

    def _renew(self):
        if self.is_writing:
            self.fleet.timeline.after(0.2, self._renew)
        elif self.is_alive and not self.is_doomed:
            if not self.is_paused:
                self.fleet.timeline.debts.append(0.0)
                try:
                    self.lease.renew()
                except Killed:
                    self.is_doomed = True
                finally:
                    self.fleet.timeline.debts.pop()
            self.fleet.timeline.after(self.lease.duration_s / RENEWALS, self._renew)

    def tick(self):
        """A tick as Controller.run makes it, with the end of the run; False once the driver has ended."""
        controller, context = self.controller, self.context
        try:
            if not controller.state.state.is_end:
                controller.tick()
        except RaymegaError as error:
            context.fail(error)
        if not controller.state.state.is_end:
            return True
        context.end()
        self.lease.release()
        return False

    def end(self):
        """The process is gone, and with it what it owns in the cluster."""
        self.is_alive = False
        self.fleet.cluster.end_driver(self)
