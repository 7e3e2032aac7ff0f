"""RayMetricsSink: the metrics of a run as Ray metrics, which every node's agent shows to Prometheus.

It owns tags, freshness and the thread that publishes; names are tracking.names', and which event
carries which metric is tracking.metrics'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import NamedTuple, Protocol

import ray
from ray.util import metrics as ray_metrics

from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    BadStep,
    Measured,
    RunEvent,
    RunStarted,
    SaveFailed,
    SaveSkipped,
    StepFinished,
)
from raymega.tracking.names import Metric, find_metric
from raymega.tracking.sink import metrics_of, standing_metrics_of

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Ray forgets a gauge that is not set again within two of its report intervals (20 s)."""
TAGS = ("run", "attempt")
RANK_TAG = "rank"
SINCE_BEGIN = (
    "checkpoint/failed_saves", "checkpoint/skipped_saves", "run/bad_steps", "run/rollbacks",
)  # fmt: skip
"""What is counted from the driver's begin on."""
NO_RANK = -1


class Instruments(Protocol):
    """Where values go; called from the sink's thread only."""

    def publish(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """Show ``value`` under ``tags``; of a counter, the total under these very tags."""


class _Key(NamedTuple):
    name: str
    rank: int


class RayMetricsSink:
    """Shows the newest value of each metric under the stable tags run, attempt and rank.

    ``emit`` only remembers. The thread sets every value again each ``refresh_s``, so that what is
    measured rarely stays visible while the run lives, and what belongs to an earlier attempt or to
    a run that is over fades away.
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
            clock: Seconds since the epoch, for the time of the last step.
            instruments: Ray's own unless a test brings others.
            refresh_s: Time between two publications.
        """
        self._clock, self._refresh_s = clock, refresh_s
        self._instruments = instruments or RayInstruments()
        self._run, self._attempt = "", 0
        self._standing: dict[_Key, float] = {}
        self._measured: dict[_Key, float] = {}
        self._lock = Lock()
        self._closing = Event()
        self._thread = Thread(target=self._work, name="ray-metrics-sink", daemon=True)
        self._thread.start()

    def emit(self, event: RunEvent) -> None:
        """Remember what the event says; returns at once."""
        with self._lock:
            self._turn(event)
            for name, value in metrics_of(event).items():
                self._measured[_Key(name, NO_RANK)] = value
            for rank, values in event.ranks.items() if isinstance(event, Measured) else ():
                self._measured.update({_Key(name, rank): value for name, value in values.items()})
            for name, value in standing_metrics_of(event).items():
                self._stand(name, value)

    def close(self, timeout_s: float) -> None:
        """Publish once more and stop; what Ray has not sent by then it sends when it is closed."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _turn(self, event: RunEvent) -> None:
        """What an event changes beside the values that it carries."""
        match event:
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
        self._stand(name, self._standing.get(_Key(name, NO_RANK), 0) + 1)

    def _stand(self, name: str, value: float) -> None:
        """Remember a value that outlives the attempt."""
        self._standing[_Key(name, NO_RANK)] = value

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._refresh_s)
            try:
                self._publish()
            except Exception as error:  # noqa: BLE001 - the thread's edge: watching stops no run
                log.warning("Ray takes no metrics, and gets no more of them: %r", error)
                return

    def _publish(self) -> None:
        with self._lock:
            values = self._standing | self._measured
            tags = dict(zip(TAGS, (self._run, str(self._attempt)), strict=True))
        for key, value in values.items():
            metric = find_metric(key.name)
            own = {RANK_TAG: str(key.rank)} if metric.is_per_rank else {}
            own |= {metric.part: metric.of} if metric.part else {}
            self._instruments.publish(metric, value, tags | own)


class RayInstruments:
    """Ray's gauges and counters, made when they are first needed. Nothing goes out without a Ray."""

    def __init__(self) -> None:
        self._gauges: dict[str, ray_metrics.Gauge] = {}
        self._counters: dict[str, ray_metrics.Counter] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See Instruments."""
        if not ray.is_initialized():
            return
        if metric.kind == "counter":
            self._raise_to(metric, value, dict(tags))
            return
        name = metric.prometheus_name
        if name not in self._gauges:
            self._gauges[name] = ray_metrics.Gauge(name, metric.help, tuple(tags))
        self._gauges[name].set(value, dict(tags))

    def _raise_to(self, metric: Metric, total: float, tags: dict[str, str]) -> None:
        """Ray counts by increments: the rise since the last time; a total never falls."""
        name = metric.prometheus_name
        if name not in self._counters:
            self._counters[name] = ray_metrics.Counter(name, metric.help, tuple(tags))
        series = (name, tuple(tags.values()))
        rise = total - self._totals.get(series, 0.0)
        if rise > 0:
            self._counters[name].inc(rise, tags)
            self._totals[series] = total
