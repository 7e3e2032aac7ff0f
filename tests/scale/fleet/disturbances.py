"""What happens to a simulated fleet, each kind at random times of its own rate."""

from collections import Counter

from tests.scale.fleet.training import Worker

MINUTE_S = 60.0


class Disturbances:
    """Deaths, drains, hangs, and troubles of the store and of drivers, until ``end``.

    Attributes:
        happened: How often each kind has happened.
        last_s: Time of the last one.
        rival_is_due: A second driver is to begin beside the one that is paused.
    """

    def __init__(self, fleet):
        self.fleet, self.timeline, self.draw = fleet, fleet.timeline, fleet.draw
        self.cluster, self.store = fleet.cluster, fleet.store
        self.happened, self.is_over, self.rival_is_due = Counter(), False, False
        self.last_s = self.timeline.now_s
        every_minutes = {
            self._kill_rank: 60, self._kill_node: 90, self._drain_node: 80, self._hang: 240,
            self._slow_store: 200, self._failing_store: 240, self._kill_driver: 200,
            self._kill_driver_at_write: 200, self._pause_driver: 100, self._stop: 400,
        }  # fmt: skip
        for action, minutes in every_minutes.items():
            self._again(action, minutes)

    def note(self):
        self.last_s = self.timeline.now_s

    def end(self):
        """Nothing happens from here, and missing nodes come."""
        self.is_over = True
        self._mend_store()
        for _ in range(self.fleet.num_nodes - len(self.cluster.nodes)):
            self.cluster.add_node(self.fleet.gpus)

    def _again(self, action, minutes):
        wait_s = self.draw.expovariate(1 / (minutes * MINUTE_S))
        self.timeline.after(wait_s, self._disturb, action, minutes)

    def _disturb(self, action, minutes):
        if not self.is_over:
            self.note()
            self.happened[action.__name__.strip("_").replace("_", " ")] += 1
            action()
            self._again(action, minutes)

    # Ranks and nodes.

    def _kill_rank(self):
        workers = [each for each in self.cluster.actors if isinstance(each, Worker)]
        if workers:
            self.draw.choice(workers).die()

    def _kill_node(self):
        if self.cluster.nodes:
            self._lose_node(self.draw.choice(sorted(self.cluster.nodes)))

    def _lose_node(self, name):
        if name in self.cluster.nodes:
            self.note()
            self.cluster.kill_node(name)
            is_late = self.draw.random() < 0.3
            minutes = self.draw.expovariate(1 / 30) if is_late else self.draw.uniform(0.2, 5.0)
            self.timeline.after(minutes * MINUTE_S, self._replace_node)

    def _replace_node(self):
        if len(self.cluster.nodes) < self.fleet.num_nodes:
            self.cluster.add_node(self.fleet.gpus)

    def _drain_node(self):
        """A node leaves in a few minutes; at times a substitute is there before."""
        names = [name for name, node in self.cluster.nodes.items() if node.leaves_s is None]
        if names:
            name, seconds = self.draw.choice(sorted(names)), self.draw.uniform(60.0, 400.0)
            self.cluster.nodes[name].leaves_s = self.timeline.now_s + seconds
            if self.draw.random() < 0.7:
                after_s = self.draw.uniform(1.0, 60.0)
                self.timeline.after(after_s, self.cluster.add_node, self.fleet.gpus)
            self.timeline.after(seconds, self._lose_node, name)

    def _hang(self):
        for training in [*self.fleet.trainings.values()][-1:]:
            training.get_stuck()

    # The store.

    def _slow_store(self):
        self.store.put_s = self.draw.uniform(5.0, 30.0)
        self.timeline.after(self.draw.uniform(60.0, 900.0), self._mend_store)

    def _failing_store(self):
        self.store.fails = self.draw.choice([0.1, 0.5, 1.0])
        self.timeline.after(self.draw.uniform(10.0, 600.0), self._mend_store)

    def _mend_store(self):
        self.note()
        self.store.put_s, self.store.fails = 0.05, 0.0

    # Drivers.

    def _kill_driver(self):
        for driver in self.fleet.drivers:
            driver.is_doomed = True

    def _kill_driver_at_write(self):
        for driver in self.fleet.drivers:
            driver.store.puts_to_live = self.draw.randrange(6)

    def _pause_driver(self):
        """Stop a driver's process for a while; at times another one begins meanwhile."""
        drivers = [each for each in self.fleet.drivers if each.controller is not None]
        if drivers:
            seconds = self.draw.uniform(5.0, 300.0)
            self.draw.choice(drivers).paused_until_s = self.timeline.now_s + seconds
            if self.draw.random() < 0.7:
                self.timeline.after(seconds / 2, setattr, self, "rival_is_due", True)

    def _stop(self):
        for driver in self.fleet.drivers:
            if driver.controller is not None:
                driver.controller.request_stop()
