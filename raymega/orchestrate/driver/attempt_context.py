"""What belongs to one attempt and goes with it: its progress, its saves, its ranks' reports."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.state import RunState
from raymega.orchestrate.driver.attempt_monitor import AttemptMonitor
from raymega.orchestrate.driver.checkpoint_committer import CheckpointCommitter
from raymega.orchestrate.driver.rank_reports import RankReports
from raymega.orchestrate.driver.scaling_policy import ScalingPolicy
from raymega.plan.run_plan import RunPlan
from raymega.storage.store import Store


@dataclass(kw_only=True, slots=True)
class AttemptContext:
    """One attempt, on the grid of ``plan``."""

    plan: RunPlan
    attempt: AttemptMonitor
    committer: CheckpointCommitter
    ranks: RankReports
    is_announced: bool = False


def begin_work(
    grids: ScalingPolicy, state: RunState, *, store: Store, executor: Executor, clock: Clock
) -> AttemptContext:
    """Nothing of ``state``'s attempt has happened yet; it is on the present one of ``grids``."""
    plan = grids.now
    return AttemptContext(
        plan=plan,
        attempt=AttemptMonitor(
            world_size=plan.grid.world_size,
            first_step=state.step,
            elastic=plan.job.elastic,
            now_s=clock.monotonic(),
            steps_s=grids.steps_s(),
        ),
        committer=CheckpointCommitter(
            plan=plan, attempt=state.attempt, store=store, executor=executor, clock=clock
        ),
        ranks=RankReports(plan),
    )
