"""A run on a simulated fleet, from its first driver to its end.

The controller, worker group, lease, journal, committer and retention are the engine's. ``Fleet.run`` raises
at the first invariant that does not hold; the message begins with the seed.
"""

import random
from collections import Counter

from raymega.errors import CapacityError, LeaseError, PreemptedError, StorageError, WorkerError
from tests.scale.fleet.cluster import Cluster
from tests.scale.fleet.disturbances import MINUTE_S, Disturbances
from tests.scale.fleet.drivers import Driver, Objects, Sink, Weather
from tests.scale.fleet.timeline import Killed, Timeline
from tests.scale.fleet.training import Training, Worker
from tests.scale.fleet.witness import Witness

MAY_END = (CapacityError, LeaseError, PreemptedError, StorageError)
"""Errors with which a driver may end here; a supervisor starts the next."""
LAST_SAVE = "the last save failed"
"""Begin of the error of a run whose store was down at its end for longer than the job waits; its remedy is the next driver."""
LAST_STEPS = 3
"""Steps of a run that is left in peace, before it is asked to end."""


class Fleet:
    """One run and all that it works with.

    Attributes:
        trainings: Training of each attempt.
        drivers: Drivers that are alive, the first begun first.
    """

    def __init__(self, plan, *, seed, num_nodes, gpus, minutes, step_s, folder, monkeypatch):
        self.seed, self.draw, self.plan, self.folder = seed, random.Random(seed), plan, folder
        self.timeline = Timeline()
        self.cluster = Cluster(self.timeline, self.draw, make_worker=self._make_worker)
        self.cluster.take_the_place_of_ray(monkeypatch)
        self.gpus, self.num_nodes, self.step_s = gpus, num_nodes, step_s
        self.trainings, self.drivers, self.num_drivers, self.ends = {}, [], 0, Counter()
        self.objects, self.store, self.sink = Objects(self), Weather(self), Sink()
        self.disturbances, self.witness = Disturbances(self), Witness(self)
        self._end_s, self._last_step = self.timeline.now_s + minutes * MINUTE_S, None
        for _ in range(num_nodes):
            self.cluster.add_node(gpus)

    def _make_worker(self, cluster, owner, group, number):
        return Worker(cluster, owner, group, number, self)

    def training_of(self, owner, message):
        """Return the training that a worker joins by its start message."""
        if message.attempt not in self.trainings:
            self.witness.see_start(owner, message)
            self.trainings[message.attempt] = Training(self, owner, message)
        training = self.trainings[message.attempt]
        if training.owner is not owner:
            self.accuse(f"drivers {training.owner.number} and {owner.number} have one attempt")
        return training

    def accuse(self, what):
        raise AssertionError(
            f"seed {self.seed}, minute {self.timeline.now_s / MINUTE_S:.1f}: {what}"
        )

    def knows_gone(self, holder):
        """Whether a driver is known to have ended; every third is on a machine that nobody can ask."""
        is_gone = all(str(each.number) != holder.token for each in self.drivers)
        return is_gone and int(holder.token) % 3 != 0

    def run(self):
        """Let the fleet live to its end, and return it.

        Raises:
            AssertionError: An invariant does not hold.
        """
        while self.drivers or not self._is_ended():
            self._come_to_an_end()
            if not self.drivers or self.disturbances.rival_is_due:
                self.disturbances.rival_is_due = False
                self.begin_driver()
                continue
            working = [each for each in self.drivers if not each.is_paused]
            if not working:
                self.timeline.advance_to(self.timeline.now_s + 1.0)
            for driver in working:
                if driver in self.drivers and driver.controller is not None:
                    self._let(driver, driver.tick)
            self.witness.see_progress()
        self.witness.see_end()
        return self

    def begin_driver(self):
        """Start a driver; after one that cannot have the run, or whose store fails, a minute passes."""
        self.num_drivers += 1
        driver = Driver(self, self.num_drivers)
        self.drivers.append(driver)
        self._let(driver, driver.begin)
        self.timeline.sleep(1.0 if driver in self.drivers else MINUTE_S)

    def _let(self, driver, act):
        """Let ``driver`` act, and end it if it has ended or was killed."""
        before, self.cluster.current = self.cluster.current, driver
        is_going_on = False
        try:
            is_going_on = act()
            if not is_going_on:
                self.witness.see_released(driver)
                driver.context.raise_what_ended_it()
                self.ends["done"] += 1
        except Killed:
            driver.is_doomed = True
            self.ends["killed"] += 1
        except MAY_END as error:
            self.ends[type(error).__name__] += 1
        except WorkerError as error:
            if not str(error).startswith(LAST_SAVE):
                raise
            self.ends[LAST_SAVE] += 1
        finally:
            self.cluster.current = before
        if driver.is_doomed or not is_going_on:
            driver.end()
            self.drivers.remove(driver)
        else:
            self.witness.see_driver(driver)

    def _come_to_an_end(self):
        """End what happens when the time is over, and the run a few steps later."""
        if not self.disturbances.is_over:
            if self.timeline.now_s > self._end_s or self.witness.is_done:
                self.disturbances.end()
                self._last_step = self.witness.num_steps + LAST_STEPS
        elif self.witness.num_steps >= self._last_step:
            for driver in self.drivers:
                if driver.controller is not None:
                    driver.controller.request_stop()

    def _is_ended(self):
        if self._last_step is None:
            return False
        return self.witness.is_done or self.witness.num_steps >= self._last_step
