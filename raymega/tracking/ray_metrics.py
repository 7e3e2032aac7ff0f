"""RayMetricsSink publishes a run's metrics as Ray metrics, which the agent of each node exports to Prometheus.

Tags, refresh and the publishing thread are here; names, and which event carries which metric, are in
`tracking/names.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import Protocol

import ray
from ray.util import metrics as ray_metrics

from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    BadStep,
    RunEvent,
    RunStarted,
    SaveFailed,
    SaveSkipped,
    StepFinished,
)
from raymega.tracking.names import Metric, find_metric, metrics_of, standing_metrics_of

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Seconds between publications; Ray drops a gauge not set again within two report intervals (20 s)."""
TAGS = ("run", "attempt")
RANK_TAG = "rank"
SINCE_BEGIN = (
    "checkpoint/failed_saves", "checkpoint/skipped_saves", "run/bad_steps", "run/rollbacks",
)  # fmt: skip
"""Names of the metrics that count from the driver's start, and so begin at 0."""


class Instruments(Protocol):
    """Destination of values; called from the sink's thread only."""

    def publish(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """Publish ``value`` under ``tags``; for a counter, the total under exactly these tags."""


class RayMetricsSink:
    """Sink that publishes the newest value of each metric under the stable tags run and attempt.

    Each rank publishes its own metrics in its own process, see RankMetrics. ``emit`` only stores values. The thread publishes all of them every ``refresh_s``: a metric that is
    measured rarely stays visible while the run lives, and values of an earlier attempt expire.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        instruments: Instruments | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        """Start the thread.

        Args:
            clock: Clock in seconds since the epoch, for the time of the last step.
            instruments: Destination of the values; Ray's gauges and counters unless a test passes others.
            refresh_s: Seconds between two publications.
        """
        self._clock, self._refresh_s = clock, refresh_s
        self._instruments = instruments or RayInstruments()
        self._run, self._attempt = "", 0
        self._standing: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        self._lock = Lock()
        self._closing = Event()
        self._thread = Thread(target=self._work, name="ray-metrics-sink", daemon=True)
        self._thread.start()

    def emit(self, event: RunEvent) -> None:
        """Store the event's values and return at once."""
        with self._lock:
            self._turn(event)
            # measured: forgotten with the attempt
            for name, value in metrics_of(event).items():
                self._measured[name] = value
            # standing: kept over attempts
            for name, value in standing_metrics_of(event).items():
                self._stand(name, value)

    def close(self, timeout_s: float) -> None:
        """Publish once more and stop the thread; Ray sends what is pending when it shuts down."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _turn(self, event: RunEvent) -> None:
        """Update tags, counts and standing values, which an event does not carry as metrics."""
        match event:
            # Counts begin at 0, or rates over them would miss the first increase.
            case RunStarted():
                self._run = event.name
                for name in SINCE_BEGIN:
                    self._stand(name, 0)
                self._stand("run/last_step_unix_s", self._clock())
            case AttemptStarted():
                self._attempt = event.attempt
                self._measured.clear()
            case StepFinished():
                self._stand("run/last_step_unix_s", self._clock())
            case SaveFailed():
                self._count("checkpoint/failed_saves")
            case SaveSkipped():
                self._count("checkpoint/skipped_saves")
            case BadStep():
                self._count("run/bad_steps")
            case AttemptFailed(is_rollback=True):
                self._count("run/rollbacks")

    def _count(self, name: str) -> None:
        self._stand(name, self._standing.get(name, 0) + 1)

    def _stand(self, name: str, value: float) -> None:
        """Store a value that outlives the attempt."""
        self._standing[name] = value

    def _work(self) -> None:
        # The last round comes after close(), so that final values are published.
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._refresh_s)
            try:
                self._publish()
            except Exception as error:  # noqa: BLE001 - the thread's edge: watching stops no run
                log.warning(
                    "Ray does not accept metrics, so none are published any more: %r", error
                )
                return

    def _publish(self) -> None:
        with self._lock:
            # Copied under the lock: publishing may take long.
            values = self._standing | self._measured
            tags = dict(zip(TAGS, (self._run, str(self._attempt)), strict=True))
        for name, value in values.items():
            metric = find_metric(name)
            own = {metric.part: metric.of} if metric.part else {}
            self._instruments.publish(metric, value, tags | own)


class RankMetrics:
    """Publisher of the metrics of one rank in that rank's process, under the tags run and rank.

    The agent of the rank's own node exports them. Without the tag attempt a restart begins no new series.
    """

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        instruments: Instruments | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        """Prepare; a thread starts with the first values.

        Args:
            run: Name of the run.
            rank: Global rank.
            instruments: Destination of the values; Ray's gauges unless a test passes others.
            refresh_s: Seconds between two publications.
        """
        self._tags = {"run": run, RANK_TAG: str(rank)}
        self._instruments, self._refresh_s = instruments or RayInstruments(), refresh_s
        self._values: dict[str, float] = {}
        self._closing = Event()
        self._thread = Thread(target=self._work, name="rank-metrics", daemon=True)

    def update(self, values: Mapping[str, float]) -> None:
        """Publish these values, by metric name, now and until they are replaced; never block."""
        self._values = {**self._values, **values}
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Publish no more: the values fade."""
        self._closing.set()

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                for name, value in self._values.items():
                    self._instruments.publish(find_metric(name), value, self._tags)
            except Exception as error:  # noqa: BLE001 - the thread's edge: watching stops no run
                log.warning("Ray does not accept metrics of this rank: %r", error)
                return
            self._closing.wait(self._refresh_s)


class RayInstruments:
    """Gauges and counters of Ray, created on first use; without a running Ray nothing is published."""

    def __init__(self) -> None:
        self._gauges: dict[str, ray_metrics.Gauge] = {}
        self._counters: dict[str, ray_metrics.Counter] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """Publish a value to Ray; see :class:`Instruments`."""
        if not ray.is_initialized():
            return
        if metric.kind == "counter":
            self._raise_to(metric, value, dict(tags))
            return
        name = metric.prometheus_name
        # Gauges are kept: creating one registers it with Ray's agent.
        if name not in self._gauges:
            self._gauges[name] = ray_metrics.Gauge(name, metric.help, tuple(tags))
        self._gauges[name].set(value, dict(tags))

    def _raise_to(self, metric: Metric, total: float, tags: dict[str, str]) -> None:
        """Increment Ray's counter by the rise since the last call; a lower total changes nothing."""
        name = metric.prometheus_name
        if name not in self._counters:
            self._counters[name] = ray_metrics.Counter(name, metric.help, tuple(tags))
        series = (name, tuple(tags.values()))
        rise = total - self._totals.get(series, 0.0)
        if rise > 0:
            self._counters[name].inc(rise, tags)
            self._totals[series] = total
