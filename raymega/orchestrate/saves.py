"""From the ranks' ShardSaved reports to committed checkpoints: collect, commit, delete the old.

It owns who may commit (this driver, when every rank has written) and does it beside the control
loop, which a slow store must not delay. A save that fails is an outcome, never an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from raymega.checkpoint.assembly import assemble
from raymega.checkpoint.manifest import Manifest, commit
from raymega.checkpoint.retention import prune
from raymega.errors import RaymegaError
from raymega.messages import ShardSaved
from raymega.orchestrate.clock import Clock
from raymega.orchestrate.gather import Gather
from raymega.orchestrate.journal import newest_attempt
from raymega.plan.grid import Grid
from raymega.plan.run_plan import RunPlan
from raymega.storage.store import Store

log = logging.getLogger(__name__)

_AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The checkpoint of ``step`` exists; ``key`` and ``uri`` are its manifest's."""

    step: int
    key: str
    uri: str
    stall_s: float
    save_s: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The checkpoint of ``step`` does not exist, and ``reason`` is why."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Superseded:
    """Another driver has begun attempt ``by`` of the run; this one may not commit any more."""

    step: int
    by: int


Outcome = Committed | Refused | Superseded


class Saves:
    """The saves of one attempt."""

    def __init__(
        self, *, plan: RunPlan, attempt: int, store: Store, executor: Executor, clock: Clock
    ) -> None:
        """``executor`` must have one thread, so that commits keep their order."""
        self._plan, self._attempt = plan, attempt
        self._store, self._executor, self._clock = store, executor, clock
        self._shards: Gather[ShardSaved] = Gather(plan.grid.world_size)
        self._under_way: list[Future[Outcome]] = []

    @property
    def is_idle(self) -> bool:
        """Every save that all ranks have reported has an outcome, and it was taken."""
        return not self._under_way

    def add(self, shard: ShardSaved) -> None:
        """Take in a rank's part; the last one starts the commit. Never blocks."""
        shards = self._shards.add(rank=shard.rank, step=shard.step, value=shard)
        if shards:
            self._under_way.append(self._executor.submit(self._finish, shards))

    def take_outcomes(self) -> list[Outcome]:
        """What became of saves since the last call; never blocks."""
        done = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if not future.done()]
        return [future.result() for future in done]

    def wait(self, timeout_s: float) -> None:
        """Block until every commit under way has an outcome."""
        wait(self._under_way, timeout=timeout_s)

    def _finish(self, shards: Mapping[int, ShardSaved]) -> Outcome:
        step = next(iter(shards.values())).step
        begun_s = self._clock.monotonic()
        try:
            manifest = self._assemble(shards)
            newest = newest_attempt(self._store)
            if newest > self._attempt:
                return Superseded(step=step, by=newest)
            commit(self._store, manifest)
        except RaymegaError as error:
            return Refused(step=step, reason=str(error))
        self._delete_old()
        written_s = max(shard.stall_s + shard.write_s for shard in shards.values())
        return Committed(
            step=step,
            key=manifest.key,
            uri=f"{self._store.uri}/{manifest.key}",
            stall_s=max(shard.stall_s for shard in shards.values()),
            save_s=written_s + self._clock.monotonic() - begun_s,
            num_bytes=sum(shard.num_bytes for shard in shards.values()),
        )

    def _assemble(self, shards: Mapping[int, ShardSaved]) -> Manifest:
        grid = self._plan.grid
        return assemble(
            tuple(shards.values()),
            world_size=grid.world_size,
            attempt=self._attempt,
            created=self._clock.timestamp(),
            job=self._plan.job.model_dump(mode="json"),
            grid=degrees(grid),
        )

    def _delete_old(self) -> None:
        try:
            prune(self._store, keep_last=self._plan.job.checkpoint.keep_last)
        except RaymegaError as error:
            log.warning("old checkpoints were not deleted: %s", error)


def degrees(grid: Grid) -> dict[str, int]:
    """Axis to degree, as records show a grid."""
    return {axis: grid.degree(axis) for axis in _AXES}
