"""Verification of a job: shrink it, train it on one rank and on sampled layouts, and compare.

`cli/verify.py` prints the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raymega.config.schema import Job
from raymega.data.checks import training_faults
from raymega.errors import ConfigError, WorkerError
from raymega.plan.run_plan import job_values
from raymega.verify.compare import LIMIT, LayoutComparison, Reference, compare, make_reference
from raymega.verify.launch import ForkServer, LayoutFailedError, open_fork_server
from raymega.verify.layout import Layout
from raymega.verify.layout_sampling import draw_layouts
from raymega.verify.legal_layouts import layout_of, reference_layout
from raymega.verify.minimise import minimise
from raymega.verify.shrink import Shrunk, shrink_job


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that set how thorough a verification is.

    Attributes:
        layouts: Number of layouts that are sampled.
        max_ranks: Largest number of ranks of a layout.
        seed: Seed of the sampling.
        steps: Number of optimizer steps that each layout trains.
        max_params: Largest number of parameters of the shrunk model.
        limit: Largest deviation that passes.
        timeout_s: Longest time of one layout in seconds.
    """

    layouts: int = 8
    max_ranks: int = 8
    seed: int = 0
    steps: int = 3
    max_params: int = 2_000_000
    limit: float = LIMIT
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one layout; ``comparison`` is None where its ranks failed."""

    layout: Layout
    comparison: LayoutComparison | None
    failure: str
    seconds: float

    @property
    def is_same(self) -> bool:
        """True where the layout trained the same run as the reference."""
        return self.comparison is not None and self.comparison.first is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Verdict of a verification, with its evidence.

    ``smallest`` is the smallest layout found to fail. ``router_margin`` is the least margin of a routing
    decision on one rank, infinite without experts: if it is below rounding errors, a layout may choose
    another expert. ``fp8_margin`` is the same for roundings to fp8. ``undecided`` weights may differ by
    noise, see Reference.
    """

    shrunk: Shrunk
    options: Options
    outcomes: tuple[Outcome, ...]
    smallest: Outcome | None
    router_margin: float
    undecided: tuple[str, ...]
    fp8_margin: float
    seconds: float

    @property
    def is_same(self) -> bool:
        """True where every layout trained the same run as the reference."""
        return all(outcome.is_same for outcome in self.outcomes)


class Watcher:
    """Callbacks of a verification's progress; this base class ignores them."""

    def on_start(self, shrunk: Shrunk, num_layouts: int) -> None:
        """Note the shrunk job, once, before the first process."""

    def on_reference(self) -> None:
        """Note that the run on one rank is done."""

    def on_layout(self, outcome: Outcome) -> None:
        """Note that a sampled layout is done."""

    def on_shrinking(self) -> None:
        """Note that a simpler layout runs next, after a failure."""


def verify_job(job: Job, options: Options, watcher: Watcher) -> Report:
    """Test that ``job`` trains the same run on sampled layouts, or find one where it does not.

    Raises:
        ConfigError: The job cannot be made small enough, or has no other layout.
        WorkerError: The run on one rank failed, so there is no reference.
    """
    began = time.monotonic()
    # shrink, and sample layouts
    shrunk = shrink_job(
        job,
        steps=options.steps,
        max_params=options.max_params,
        max_ranks=options.max_ranks,
        is_data_there=_is_data_there(job),
        seed=options.seed,
    )
    layouts = draw_layouts(
        shrunk.job,
        # The shrunk job has a grid of one rank and a smaller micro-batch: take the grid from ``job``.
        own=replace(layout_of(job), micro_batch_size=shrunk.job.schedule.micro_batch_size),
        count=options.layouts,
        max_ranks=options.max_ranks,
        seed=options.seed,
    )
    if not layouts:
        raise ConfigError(
            fact=f"no layout of 2 to {options.max_ranks} ranks could be drawn",
            rule="a proof compares at least one layout with one rank",
            remedy="use --layouts 1 or more and --max-ranks 2 or more",
        )
    watcher.on_start(shrunk, len(layouts))
    # train the reference, then each layout, and compare
    with open_fork_server(timeout_s=options.timeout_s) as fork_server:
        reference = _train_reference(fork_server, shrunk.job, options.steps)
        watcher.on_reference()
        trial = _Trial(
            fork_server=fork_server, job=shrunk.job, reference=reference, options=options
        )
        outcomes = []
        for layout in layouts:
            outcomes.append(trial.run(layout))
            watcher.on_layout(outcomes[-1])
        # minimise a failure
        failed = [outcome for outcome in outcomes if not outcome.is_same]
        smallest = _find_smallest(trial, failed, watcher.on_shrinking) if failed else None
    return Report(
        shrunk=shrunk,
        options=options,
        outcomes=tuple(outcomes),
        smallest=smallest,
        router_margin=reference.router_margin,
        undecided=tuple(sorted(reference.undecided)),
        fp8_margin=reference.fp8_margin,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    fork_server: ForkServer
    job: Job
    reference: Reference
    options: Options

    def run(self, layout: Layout) -> Outcome:
        """Train a layout and compare it; a failure of its ranks is part of the outcome."""
        began, comparison, failure = time.monotonic(), None, ""
        try:
            with self.fork_server.run(self.job, layout, steps=self.options.steps) as results:
                comparison = compare(results, self.reference, limit=self.options.limit)
        except LayoutFailedError as error:
            failure = str(error)
        return Outcome(
            layout=layout,
            comparison=comparison,
            failure=failure,
            seconds=time.monotonic() - began,
        )


def _train_reference(fork_server: ForkServer, job: Job, steps: int) -> Reference:
    try:
        with fork_server.run(job, reference_layout(job), steps=steps) as results:
            return make_reference(results[0])
    except LayoutFailedError as error:
        raise WorkerError(
            fact=f"the run on one rank failed: {error}",
            rule="every layout is compared with it",
            remedy="make the job train on one rank first",
        ) from error


def _find_smallest(
    trial: _Trial, failed: list[Outcome], on_shrinking: Callable[[], None]
) -> Outcome:
    """Minimise the failed layout that has the fewest ranks."""
    start = min(failed, key=lambda outcome: outcome.layout.world_size)
    seen = {start.layout: start}

    def is_failing(layout: Layout) -> bool:
        on_shrinking()
        seen[layout] = trial.run(layout)
        return not seen[layout].is_same

    return seen[minimise(trial.job, start.layout, is_failing)]


def _is_data_there(job: Job) -> bool:
    # a few steps make no epochs
    return not training_faults(job_values(job) | {"run.steps": 0})
